from __future__ import annotations

import subprocess
import sys

import pytest

from overlap_sweep import backends
from overlap_sweep.backends import transformer_engine
from overlap_sweep.errors import UserError


@pytest.mark.parametrize(
    ("device", "missing", "chosen"),
    [
        ("cpu", None, "torch"),
        ("cpu", "not installed", "torch"),
        ("cuda", "not installed", "torch"),
        ("cuda", None, "transformer_engine"),
    ],
)
def test_auto_is_transformer_engine_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str | None, chosen: str
) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: missing)
    assert backends.choose(device) == chosen


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_loads_without_its_library_and_has_all_functions(name: str) -> None:
    module = backends.load(name)
    for function in ("refusal", "default_knobs", "has_default", "parameter_shapes", "prepare", "build"):
        assert callable(getattr(module, function))


@pytest.mark.parametrize("name", backends.LAYERS)
def test_layers_load_without_their_library_and_have_all_that_is_asked_of_them(name: str) -> None:
    module = backends.load_layers(name)
    assert isinstance(module.HAS_DEFAULT, bool)
    for function in ("refusal", "build", "attention"):
        assert callable(getattr(module, function))


def test_the_launchers_process_needs_no_torch_for_layers() -> None:
    load = "from overlap_sweep import backends; [backends.load_layers(name) for name in backends.LAYERS]"
    code = f"import sys; {load}; import overlap_sweep.workloads.layer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(UserError, match="choose one of auto, torch, transformer_engine, megatron"):
        backends.load("magic")
