"""What is tried together on the whole layer: the combinations, their points and files, presets, and the fastest."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.run_directory import Result, Status
from overlap_sweep.search.tasks import Task
from overlap_sweep.tuner.workflow import (
    BEST,
    _fastest_together,
    _holds_for_layers,
    case_word,
    check_presets,
    combinations,
    presets,
)
from overlap_sweep.workloads.layer.result import PASSES, LayerTimes, VariantTimes
from overlap_sweep.workloads.operator.choice import Candidate as Choosable
from overlap_sweep.workloads.operator.choice import PassChoice
from overlap_sweep.workloads.operator.switches import plan
from tests.make_point import operator_point, timing_of

Setting = dict[str, Any]
RING, RING4 = {"method": "ring_exchange", "num_sm": 1}, {"method": "ring_exchange", "num_sm": 4}
PIPELINE, PIPELINE8 = {"method": "pipeline", "num_sm": 4}, {"method": "pipeline", "num_sm": 8}


def choice(slot: str, *times_us: tuple[Setting | None, float]) -> PassChoice:
    """The first candidate is chosen; None is no overlap."""
    operator, phase = slot.split("_")
    made = [Choosable({slot: setting} if setting else {}, Estimate(us, 0.1, 5), (), None) for setting, us in times_us]
    measured: dict[str, Any] = {"floor_us": 10.0, "tp1_us": None, "default": None}
    chosen: dict[str, Any] = {"attempted": frozenset(), "chosen": made[0], "reason": "fastest"}
    return PassChoice(4, operator, "fwd" if phase == "fprop" else "bwd", tuple(made), **chosen, **measured)


def fc2(*more: tuple[Setting | None, float]) -> PassChoice:
    return choice("fc2_fprop", (RING, 80.0), *more, (None, 100.0))


def labels(*choices: PassChoice, limit: int = 9, within: float = 0.03) -> list[str]:
    return list(combinations(choices, limit, within))


def test_the_first_is_the_plan_of_the_choices() -> None:
    choices = [fc2((PIPELINE, 80.5)), choice("proj_fprop", (PIPELINE, 50.0), (None, 60.0))]
    found = combinations(choices, 4, 0.03)
    assert next(iter(found)) == BEST
    assert found[BEST] == plan(choices).config
    assert found[BEST].slots == {"fc2_fprop": RING, "proj_fprop": PIPELINE}


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_another_method_comes_before_other_knobs_and_the_cheapest_first_up_to_a_limit(limit: int) -> None:
    proj = choice("proj_fprop", (PIPELINE, 50.0), (RING, 50.5), (PIPELINE8, 50.3), (None, 60.0))
    methods = ["proj fwd by ring_sm1", "fc2 fwd by pipeline_sm4"]
    knobs = ["fc2 fwd by ring_sm4", "proj fwd by pipeline_sm8"]
    found = labels(fc2((RING4, 80.1), (PIPELINE, 81.5)), proj, limit=limit)
    assert found == [BEST, *methods, *knobs][:limit]


def test_of_each_kind_there_is_the_best_one_only_and_none_may_be_it() -> None:
    two = ["fc2 fwd by pipeline_sm8", "fc2 fwd by ring_sm4"]
    assert labels(fc2((PIPELINE, 80.4), (PIPELINE8, 80.2), (RING4, 80.3))) == [BEST, *two]
    found = combinations([choice("fc2_fprop", (RING, 99.0), (None, 100.0))], 4, 0.03)
    assert list(found) == [BEST, "fc2 fwd by none"]
    assert not found["fc2 fwd by none"].slots


@pytest.mark.parametrize(("within", "tried"), [(0.0, 1), (0.004, 1), (0.006, 2), (0.02, 3)])
def test_what_costs_too_much_alone_is_not_tried(within: float, tried: int) -> None:
    assert len(labels(fc2((PIPELINE, 80.4), (RING4, 81.2)), within=within)) == tried


def test_every_configuration_is_what_the_switches_allow_and_none_occurs_twice() -> None:
    scatter = {"method": "ring_exchange", "num_sm": 2}
    bulk = choice("fc1_dgrad", ({"method": "bulk", "num_sm": 4}, 100.0), (scatter, 101.0), (None, 130.0))
    for config in combinations([bulk, fc2((PIPELINE, 80.4))], 9, 0.05).values():
        rings = config.slots["fc1_dgrad"]["method"] == "ring_exchange"
        assert config.switches["tp_comm_overlap_rs_dgrad"] == rings
    # One switch holds for both, so that leaving out either overlap alone comes out as leaving out none.
    nearly = [choice("fc2_fprop", (RING, 80.0), (None, 80.5)), choice("proj_fprop", (RING, 50.0), (None, 50.5))]
    assert labels(*nearly) == [BEST]


def task(**changes: Any) -> Task:
    return Task(operator_point(**changes), [], {}, Counter())


def test_what_is_said_of_operators_is_not_said_of_layers() -> None:
    of_layers = ("tp_size=4", "model=llama3_8b", "model.hidden_size=256", "runtime.device=cpu", "precision=bf16")
    of_layers += ("layer.micro_batch_size=2", "search.max_points=9", "+experiment=tp_overlap_tuner")
    of_layers += ("workload.tokens=64", "workload.repeats=3", "++workload.seed=1")
    of_operators = ("workload=operator", "workload.default_every_s=1", "operator=fc1", "profile=all", "+repetition=1")
    of_operators += ("phases={fprop:{method:none}}",)
    assert [override for override in (*of_layers, *of_operators) if _holds_for_layers(override)] == [*of_layers]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "m_tp2_torch_fp32_tokens128"),
        ({"tp_size": 4, "precision": "bf16", "workload": {"tokens": 64}}, "m_tp4_torch_bf16_tokens64"),
        ({"backend": "transformer_engine"}, "m_tp2_transformer_engine_fp32_tokens128"),
        ({"model": {"name": "Qwen/Qwen3-0.6B"}}, "Qwen3-0.6B_tp2_torch_fp32_tokens128"),
        ({"model": {"name": "/models/tiny/config.json"}}, "tiny_tp2_torch_fp32_tokens128"),
        ({"model": {"name": "/models/tiny/"}}, "tiny_tp2_torch_fp32_tokens128"),
        ({"model": {"name": "/models/My model, é=(v2)/config.json"}}, "My-model-v2-_tp2_torch_fp32_tokens128"),
    ],
)
def test_files_and_folders_have_plain_names_that_tell_cases_apart(changes: dict[str, Any], word: str) -> None:
    assert case_word(task(**changes)) == word


def write_preset(path: Path, text: str = "fc1_fprop: {num_sm: 4}") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_presets_are_checked_for_every_tp_size_and_named_after_their_files(tmp_path: Path) -> None:
    assert presets(None, 4) == presets([], 4) == {}
    named = {"preset theirs_tp4": Path("a/theirs_tp4.yaml"), "preset mine": Path.home() / "mine.yaml"}
    assert presets(["a/theirs_tp{tp}.yaml", "~/mine.yaml"], 4) == named
    check_presets(None, ["2", "4"])
    of_each_size = write_preset(tmp_path / "theirs_tp2.yaml").replace("tp2", "tp{tp}")
    check_presets([of_each_size], ["2"])
    with pytest.raises(UserError, match=r"theirs_tp4\.yaml cannot be read"):
        check_presets([of_each_size], ["2", "4"])
    paths = [write_preset(tmp_path / folder / "tp4.yaml") for folder in ("a", "b")]
    check_presets([paths[0], paths[0]], ["4"])
    with pytest.raises(UserError, match="have the same name"):
        check_presets(paths, ["4"])


ROUNDS = [100.0, 101.0, 99.0, 100.0, 102.0, 98.0, 100.0]
FASTER = [us * 0.95 for us in ROUNDS]
UNSURE = [us * ratio for us, ratio in zip(ROUNDS, (0.97, 1.02, 0.97, 1.01, 0.97, 1.02, 0.97), strict=True)]


@pytest.mark.parametrize(
    ("samples_us", "launch_bound", "taken"),
    [
        ({"none": ROUNDS, "other": FASTER}, "", "second"),
        ({"none": FASTER, "other": ROUNDS}, "", "first"),
        ({"none": ROUNDS, "other": ROUNDS}, "", "first"),
        ({"none": ROUNDS, "other": UNSURE}, "", "first"),
        ({}, "", "first"),
        ({"none": ROUNDS}, "", "first"),
        ({"other": ROUNDS}, "", "second"),
        ({"none": ROUNDS, "other": FASTER}, "other", "first"),
        ({"none": ROUNDS, "other": FASTER}, "none", "second"),
        ({"none": ROUNDS, "other": FASTER}, "none other", "first"),
        ({"floor": ROUNDS}, "", None),
    ],
)
def test_the_first_combination_is_kept_unless_another_is_faster_beyond_the_noise(
    samples_us: dict[str, list[float]], launch_bound: str, taken: str | None
) -> None:
    """The first overlaps nothing, and is measured as `none`. Without any variant the layer has failed."""
    variants = {
        name: VariantTimes(times=dict.fromkeys(PASSES, timing_of(us)), launch_bound=name in launch_bound.split())
        for name, us in samples_us.items()
    }
    measured = LayerTimes(variants=variants)
    status: Status = "ok" if variants else "failed"
    result = Result(name="together", recorded=operator_point(), status=status, measured=measured)
    assert _fastest_together({"first": "none", "second": "other"}, result) == taken
