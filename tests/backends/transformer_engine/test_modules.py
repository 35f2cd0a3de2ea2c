"""Recipes of layers in each precision, and kernels of attention, on a fake of the library, whose import needs a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overlap_sweep.backends import transformer_engine
from overlap_sweep.backends.installed import attention_backend, attention_warnings
from overlap_sweep.errors import Refused
from overlap_sweep.overlap.recipes import RECIPES
from tests.backends.transformer_engine.fake_library import LAYERS, fake_library

HOPPER = {
    "is_fp8_available": (True, ""),
    "is_fp8_block_scaling_available": (True, ""),
    "is_mxfp8_available": (False, "Device compute capability 10.0 or higher required for MXFP8 execution."),
    "is_nvfp4_available": (False, "Device compute capability 10.0 or higher required for NVFP4 execution."),
}


@contextmanager
def modules_on(gpu: dict[str, tuple[bool, str]]) -> Iterator[tuple[Any, list[tuple[Any, ...]]]]:
    """modules.py, and what it entered: recipe, its arguments and the group."""
    entered: list[tuple[Any, ...]] = []
    names = ("transformer_engine.common", "transformer_engine.common.recipe", f"{LAYERS}.quantization")
    common, makers, quantization = (ModuleType(name) for name in names)
    common.recipe = makers  # type: ignore[attr-defined]
    for recipe in RECIPES.values():
        setattr(makers, recipe.made_by, lambda name=recipe.made_by, **given: (name, given))
    quantization.FP8GlobalState = quantization.FP8GlobalStateManager = None  # type: ignore[attr-defined]

    def autocast(enabled: bool, recipe: tuple[Any, ...], amax_reduction_group: Any) -> Any:
        entered.append((*recipe, amax_reduction_group))
        return nullcontext()

    with fake_library(), patch.dict(sys.modules, dict(zip(names, (common, makers, quantization), strict=True))):
        library = sys.modules[LAYERS]
        library.autocast = autocast  # type: ignore[attr-defined]
        for name, answer in gpu.items():
            setattr(library, name, lambda *, return_reason, answer=answer: answer if return_reason else answer[0])
        sys.modules["transformer_engine"].pytorch = library  # type: ignore[attr-defined]
        sys.modules.pop(f"{transformer_engine.__name__}.modules", None)
        from overlap_sweep.backends.transformer_engine import modules

        try:
            yield modules, entered
        finally:
            sys.modules.pop(modules.__name__)
            vars(transformer_engine).pop("modules", None)


def test_each_precision_runs_in_its_recipe() -> None:
    with modules_on(HOPPER) as (modules, entered):
        for precision in transformer_engine.PRECISIONS:
            for group in (None, "ours"):
                with modules.autocast(precision, group):
                    pass
    made = [(recipe.made_by, group) for recipe in RECIPES.values() for group in (None, "ours")]
    assert [(name, group) for name, _, group in entered] == made
    reduced = {(name, group): given for name, given, group in entered if given}
    assert reduced == {
        ("DelayedScaling", None): {"reduce_amax": False},
        ("DelayedScaling", "ours"): {"reduce_amax": True},
    }


def test_a_precision_that_the_gpu_lacks_is_refused_in_the_library_s_words() -> None:
    refused = {}
    with modules_on(HOPPER) as (modules, _):
        for precision in transformer_engine.PRECISIONS:
            try:
                modules.check_available(precision)
            except Refused as reason:
                refused[precision] = str(reason)
    said = "Transformer Engine: Device compute capability 10.0 or higher required for {} execution"
    assert refused == {"mxfp8": said.format("MXFP8"), "nvfp4": said.format("NVFP4")}


MLP = """
from torch.nn import Module

class _LayerNormMLP:
    @staticmethod
    def forward(ctx, inp, ub_overlap_ag, {taken}):
        return ub_bulk_dgrad, ub_bulk_wgrad

class LayerNormMLP(Module):
    def __init__(self, dgrad, wgrad):
        super().__init__()
        self.ub_bulk_dgrad, self.ub_bulk_wgrad = dgrad, wgrad

    def forward(self, inp):
        return _LayerNormMLP.forward(None, inp, True, {passed})
"""
"""Source of an MLP that hands its switches, as the library's does, to a function that keeps them for the backward."""


@pytest.mark.parametrize("taken", ["ub_bulk_wgrad, ub_bulk_dgrad", "ub_bulk_dgrad, ub_bulk_wgrad"])
@pytest.mark.parametrize("on", [(True, False), (False, True), (True, True)])
def test_an_mlp_overlaps_by_name_whether_the_library_exchanges_its_switches_or_not(
    taken: str, on: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"layernorm_mlp_{tmp_path.name}"
    passed = "self.ub_bulk_dgrad, self.ub_bulk_wgrad"
    (tmp_path / f"{name}.py").write_text(MLP.format(taken=taken, passed=passed))
    monkeypatch.syspath_prepend(str(tmp_path))
    mlp = import_module(name).LayerNormMLP
    with modules_on(HOPPER) as (modules, _):
        modules.te.LayerNormMLP = mlp
        layer = torch.nn.Sequential(torch.nn.Identity(), mlp(*on))
        modules._name_bulk_overlaps(layer)
    assert layer(None) == on


@pytest.mark.parametrize(("precision", "steps"), [("bf16", 0), ("fp8_delayed", 3), ("fp8_block", 1), ("nvfp4", 1)])
def test_weights_are_quantised_and_scales_found_before_anything_is_timed(precision: str, steps: int) -> None:
    with modules_on(HOPPER) as (modules, _):
        modules.FP8GlobalStateManager = type("Manager", (), {"reset": staticmethod(lambda: None)})
        taken: list[None] = []
        modules.calibrate(precision, lambda: taken.append(None))
    assert len(taken) == steps


OTHERS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f1200000000-7f1200001000 rw-p 00000000 00:00 0
7f1300000000-7f1300001000 r-xp 00000000 08:01 132 /venv/lib/nvidia/cublas/lib/libcublas.so.13
7f1400000000-7f1400001000 r-xp 00000000 08:01 133 /venv/lib/transformer_engine/libtransformer_engine.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""
OF_TORCH = """\
7f2000000000-7f2000001000 r--p 00000000 08:01 200 /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f2000001000-7f2000002000 r-xp 00001000 08:01 200 /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f2100000000-7f2100001000 r-xp 00000000 08:01 201 /venv/lib/nvidia/cudnn/lib/libcudnn_graph.so.9
7f2200000000-7f2200001000 r-xp 00000000 08:01 202 /venv/lib/nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9.19.0
"""
OF_SYSTEM = """\
7f3000000000-7f3000001000 r-xp 00000000 08:01 300 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.10.2
"""
TORCHS, SYSTEMS = "/venv/lib/nvidia/cudnn/lib", "/usr/lib/x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("backend", "maps", "expected"),
    [
        *((backend, OTHERS + OF_TORCH, []) for backend in (None, "flash (2.8.3)", "fused (cuDNN 9.19.0)")),
        (None, OTHERS, []),
        ("fused (cuDNN 9.19.0)", OF_TORCH + OF_SYSTEM, [(TORCHS, SYSTEMS, "CUDNN_HOME")]),
        ("unfused", OTHERS + OF_TORCH, [("unfused", "NVTE_DEBUG=1")]),
        ("unfused", OF_TORCH + OF_SYSTEM, [("CUDNN_HOME",), ("NVTE_DEBUG=1",)]),
    ],
)
def test_every_reason_to_doubt_is_a_sentence_that_names_what_to_do(
    backend: str | None, maps: str, expected: list[tuple[str, ...]]
) -> None:
    warnings = attention_warnings(backend, maps)
    assert len(warnings) == len(expected)
    for warning, names in zip(sorted(warnings, key=lambda text: "NVTE_DEBUG" in text), expected, strict=True):
        assert all(name in warning for name in names)
        assert warning.endswith(".")
        assert "\n" not in warning


CHOSEN: dict[str, Any] = {
    "attention_params": object(),
    "use_flash_attention": False,
    "flash_attention_backend": "2.8.3",
    "use_fused_attention": False,
}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({"attention_params": None}, None),
        ({"use_flash_attention": True}, "flash (2.8.3)"),
        ({"use_fused_attention": True}, "fused (cuDNN 9.19.0)"),
        ({}, "unfused"),
    ],
)
def test_who_computed_attention(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], backend: str | None) -> None:
    parent = "transformer_engine.pytorch.attention.dot_product_attention"
    library = ModuleType(parent)
    library.dot_product_attention = SimpleNamespace(_attention_backends={**CHOSEN, **changes})  # type: ignore[attr-defined]
    # Whether or not Transformer Engine is installed, this is the one that is imported.
    for depth in range(1, parent.count(".") + 1):
        name = ".".join(parent.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent, library)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert attention_backend() == backend
