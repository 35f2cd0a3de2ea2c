"""What each recipe is; which sizes and overlaps it refuses is in tests/golden/expected/refusals."""

import pytest

from overlap_sweep.config import BY_TORCH, PRECISIONS
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.recipes import RECIPES, Recipe, notes

FC1 = LinearShape("column", tokens=2048, in_features=1024, out_features=4096, tp_size=2)


def test_every_precision_is_torch_s_or_has_a_recipe() -> None:
    assert (*BY_TORCH.values(), *RECIPES) == PRECISIONS


def overlapped(recipe: Recipe) -> set[str]:
    found = set()
    for slot, methods in space.SLOTS.items():
        operator = slot.partition("_")[0]
        shape = LinearShape(space.OPERATORS[operator], 2048, 1024, 4096, 2)
        found |= {f"{slot} {m}" for m in methods if recipe.overlap_refusal(slot, {"method": m}, shape) is None}
    return found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_a_recipe_that_does_not_overlap_everything_says_so_in_a_sentence(recipe: Recipe) -> None:
    everything = {f"{slot} {method}" for slot, methods in space.SLOTS.items() for method in methods}
    limited = {"fp8_block": {"qkv_wgrad bulk", "fc1_wgrad bulk"}, "nvfp4": set()}
    assert overlapped(recipe) == limited.get(recipe.precision, everything)
    (note,) = notes(recipe.precision) or ("",)
    assert bool(note) == (recipe.precision in limited)
    assert not note or (note.endswith(".") and recipe.precision in note)


def test_precisions_of_torch_need_no_words() -> None:
    assert notes("bf16") == []


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_what_divides_on_more_ranks_divides_on_one(recipe: Recipe) -> None:
    """The operator on one rank is measured with every point, and is not asked about again."""
    assert recipe.sizes_refusal(FC1) is None
    assert recipe.sizes_refusal(FC1.unsharded()) is None
    assert recipe.sizes_refusal(FC1.local()) is None
