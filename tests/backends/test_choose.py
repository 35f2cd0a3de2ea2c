from __future__ import annotations

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


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(UserError, match="choose one of auto, torch, transformer_engine, megatron"):
        backends.load("magic")
