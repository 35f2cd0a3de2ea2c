"""Slots, methods, knobs, names and recipes; what is refused, and most names, are in tests/golden/expected/refusals."""

import re
from dataclasses import replace
from typing import Any

import pytest

from overlap_sweep.config import BY_TORCH, PRECISIONS
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.recipes import RECIPES, Recipe, notes
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.points import LONGEST_NAME
from overlap_sweep.runtime.resolvers import point_name
from tests.make_point import resolved


def point(**changes: Any) -> Any:
    """fc1 by bulk on two ranks, unless it is changed."""
    return resolved("operator", **{"model": "m", "method": "bulk", "num_sm": 4, **changes})


RING = {"method": "ring_exchange"}
BULK = {"method": "bulk", "num_sm": 4}
FIRST = "pipeline_rs_overlap_first_gemm"


def test_a_name_has_of_the_command_line_what_its_fixed_part_does_not_show() -> None:
    overrides = ["tp_size=2", "workload.tokens=512", "+experiment=four_operators", "runtime.timeout_s=9"]
    assert point_name(point(), overrides) == "m_tp2_fc1_bulk_sm4_tokens=512"
    # A name stays inside its sweep.
    outside = point_name(point(model="a/../.."), ["workload.tokens=../../x"])
    assert re.fullmatch(r"\.\._tp2_fc1_bulk_sm4_tokens=\.\.-\.\.-x_[0-9a-f]{6}", outside)


def test_what_is_fixed_in_a_sweep_is_a_digest_of_its_keys_and_values() -> None:
    def name(*overrides: str, fixed: tuple[str, ...] = ("profile", "runtime.device")) -> str:
        return point_name(point(), overrides, fixed)

    plain, again = name("profile=none", "runtime.device=cpu"), name("runtime.device=cpu", "profile=none")
    assert plain == again
    assert re.fullmatch(r"m_tp2_fc1_bulk_sm4_[0-9a-f]{6}", plain)
    assert len({plain, name("profile=all", "runtime.device=cpu"), name("profile=none")}) == 3
    digest = plain.rpartition("_")[2]
    assert name("profile=none", "repetition=1", "runtime.device=cpu") == f"m_tp2_fc1_bulk_sm4_repetition=1_{digest}"
    assert name("runtime.isolate=True", "use_ce=True", "workload.seed=7", fixed=()) == "m_tp2_fc1_bulk_sm4_seed=7"
    assert name("tp_size=2", "runtime.retries=3", fixed=("tp_size", "runtime.retries")) == "m_tp2_fc1_bulk_sm4"


def test_keys_that_end_alike_stay_different() -> None:
    overrides = ["compile.enabled=True", "profiling.enabled=False", "fsdp.forward_prefetch=True"]
    name = point_name(resolved("fsdp"), overrides)
    assert name.endswith("_compile.enabled=true_profiling.enabled=false_forward_prefetch=true")


def test_a_long_name_is_cut_and_stays_different() -> None:
    fits = "tolerance=" + "9" * (LONGEST_NAME - len("m_tp2_fc1_bulk_sm4_tolerance="))
    assert point_name(point(), [f"workload.{fits}"]) == f"m_tp2_fc1_bulk_sm4_{fits}"
    names = {point_name(point(), [f"workload.seed={seed}", f"workload.{fits}9"]) for seed in (1, 2)}
    assert [len(name) for name in names] == [LONGEST_NAME] * 2


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (None, "none"),
        ({}, "none"),
        ({"method": "none", "num_sm": 4}, "none"),
        ({"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": True}, "bulk_sm4"),
        ({**RING, "aggregate": False, "num_sm": 1, "use_ce": False, "cga_size": 2}, "ring_agg0_sm1_cga2_ce0"),
        ({"method": "pipeline", "num_splits": 4, "fp8_buf": True}, "pipeline_split4_fp8buf1"),
    ],
)
def test_a_brief_name_shows_no_knob_that_is_as_usual(setting: dict[str, Any] | None, name: str) -> None:
    assert space.brief_name(setting) == name


@pytest.mark.parametrize("method", space.METHODS[1:])
def test_names_tell_every_unusual_knob_and_are_read_again(method: str) -> None:
    usual = space.USERBUFFERS_DEFAULTS[method]
    others = [{**usual, knob: not value if isinstance(value, bool) else value + 1} for knob, value in usual.items()]
    others += [{**usual, "comm_priority": -1}, {**usual, "gemm_priority": -5}]
    others += [{**usual, FIRST: True}] if method == "pipeline" else []
    settings = [{"method": method, **knobs} for knobs in (usual, *others)]
    assert len({space.brief_name(setting) for setting in settings}) == len(settings)
    assert [space.setting_of(space.setting_name(setting)) for setting in settings] == settings


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("bulk_sm4", BULK),
        ("pipeline_split8_sm512", {"method": "pipeline", "num_sm": 512, "num_splits": 8}),
        ("ring_fp8buf1_agg0", {**RING, "aggregate": False, "fp8_buf": True}),
        *((name, None) for name in ("none", "", "bulky", "ringing", "bulk_", "ring__sm4", "ring_sm4_", "x_sm4")),
        ("bulk_commprio-5_gemmprio0", {"method": "bulk", "comm_priority": -5, "gemm_priority": 0}),
        ("pipeline_first1", {"method": "pipeline", FIRST: True}),
        *((name, None) for name in ("bulk_commprio-6", "bulk_commprio1", "bulk_commprio-0", "bulk_sm-4", "ring_ce-1")),
        *((name, None) for name in ("bulk_sm", "bulk_sm04", "bulk_sm513", "bulk_sm0", "bulk_sms4", "bulk_sm4_sm8")),
        *((name, None) for name in ("ring_agg2", "pipeline_split1025", "pipeline_split99999", "pipeline_cga17")),
    ],
)
def test_settings_are_read_from_names(name: str, setting: space.Setting | None) -> None:
    assert space.setting_of(name) == setting


def test_a_setting_is_the_same_as_without_the_knobs_that_the_library_would_set_so() -> None:
    plain = point(operator="fc2", phase="fprop", method="pipeline", num_splits=4)
    as_usual = replace(plain, gemm_priority=0, **{FIRST: False})
    assert space.settings(as_usual) == space.settings(plain)
    set_otherwise = {"comm_priority": -1, "gemm_priority": -2, FIRST: True}
    assert space.settings(replace(plain, **set_otherwise))["fc2_fprop"].items() >= set_otherwise.items()
    # A point without them is the point of earlier versions.
    earlier = {name: value for name, value in plain.items() if name not in set_otherwise}
    assert point_key(earlier) == point_key(plain)
    assert "needs a reduce-scatter by pipeline" in str(space.refusal(point(method="bulk", **{FIRST: True})))


def test_a_ring_exchange_by_copy_engines_is_the_same_whatever_its_num_sm() -> None:
    by_engines = {**RING, "num_sm": 8, "use_ce": True}
    assert space.without_idle_knobs(by_engines) == {**by_engines, "num_sm": 1}
    for other in ({**RING, "num_sm": 8}, {"method": "bulk", "num_sm": 8}):
        assert space.without_idle_knobs(other) == other


# How FP8 and aggregation belong to reduce-scatters and all-gathers: read in Transformer Engine 2.20.
SHARED = {"num_sm", "cga_size", "set_sm_margin", "comm_priority", "gemm_priority"}


@pytest.mark.parametrize(
    ("operator", "phase", "method", "gathers", "knobs"),
    [
        ("fc1", "dgrad", "bulk", True, SHARED),
        ("fc1", "wgrad", "bulk", False, SHARED),
        # Only gathers are aggregated, and only what is reduced can be in FP8 or not.
        ("fc2", "fprop", "ring_exchange", False, {*SHARED, "use_ce", "atomic_gemm", "fp8_buf"}),
        ("fc1", "dgrad", "pipeline", False, {*SHARED, "num_splits", "atomic_gemm", "fp8_buf", FIRST}),
        ("fc1", "dgrad", "ring_exchange", False, {*SHARED, "use_ce", "atomic_gemm"}),
        ("fc2", "dgrad", "ring_exchange", True, {*SHARED, "use_ce", "atomic_gemm", "aggregate"}),
        ("fc2", "dgrad", "none", True, set()),
    ],
)
def test_what_a_slot_carries_and_its_knobs(
    operator: str, phase: str, method: str, gathers: bool, knobs: set[str]
) -> None:
    assert space.gathers(operator, phase, method) == gathers
    assert set(space.knobs_of(operator, phase, method)) == knobs


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
