"""Which recipe a precision's layers run in, on a fake of the library, which needs a GPU to be imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overlap_sweep.backends import transformer_engine
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
