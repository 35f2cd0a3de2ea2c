"""Which setting trains fastest, and what each knob contributed. How it is told, doubts included: made/training_doubts,
made/every_workload and fsdp among the golden files."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from overlap_sweep.declared import FLOOR, SCHEDULES, TRAINS_DIFFERENTLY
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import KnobRecord, KnobSearch, read_records
from overlap_sweep.study.analysis import analyse
from overlap_sweep.study.exhibits import effects, effects_table
from overlap_sweep.study.words import cautions
from overlap_sweep.workloads.fsdp.config import TRAINING_ON
from overlap_sweep.workloads.fsdp.rows import DEVICE, NAMING, ROLES, USUAL, FsdpRow, knobs_of, roles
from overlap_sweep.workloads.fsdp.study import STUDY, how_timed
from tests.make_point import ENVIRONMENT, resolved
from tests.results.reading import PREFETCH, train, training_of


def test_settings_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    common = {"distributed.env": {"NCCL_ALGO": "Ring"}}
    for changes in (
        {},
        {"fsdp.forward_prefetch": 2},
        {"training.batch_size": 32, "compile.enabled": True},
        {"distributed.env": {"NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8"}},
        {"fsdp.backward_prefetch": None, "runtime": {"device": "cuda", "max_connections": 1}},
    ):
        train(tmp_path, {**common, **changes})
    analysis = training_of(tmp_path)
    assert {row.setting for row in analysis.rows} == {
        "defaults",
        "forward_prefetch=2",
        "batch_size=32, compile=true",
        "NCCL_MAX_CTAS=8",
        "backward_prefetch=null, max_connections=1",
    }
    assert analysis.shared == "NCCL_ALGO=Ring"
    assert analysis.reference.setting == "defaults"


def test_the_best_is_told_as_it_is_typed(tmp_path: Path) -> None:
    train(tmp_path, step_us=1500.0)
    faster = {**PREFETCH, "compile.enabled": True, "distributed.env": {"NCCL_ALGO": "Tree"}}
    train(tmp_path, faster, step_us=1000.0)
    typed = "fsdp.forward_prefetch=1 compile.enabled=true ++distributed.env.NCCL_ALGO=Tree"
    assert STUDY.to_use(training_of(tmp_path)) == typed


@pytest.mark.parametrize("value", ["Ring", "8", "LL,Simple", "a b", "null", 'a"b\\', "^x:y=$z", "0x1;#"])
def test_the_best_can_be_pasted(tmp_path: Path, value: str) -> None:
    train(tmp_path, step_us=1500.0)
    train(tmp_path, {"distributed.env": {"NOT_LISTED": value}}, step_us=1000.0)
    (typed,) = shlex.split(STUDY.to_use(training_of(tmp_path)))
    override = OverridesParser.create().parse_override(typed)
    assert override.is_force_add()
    assert override.key_or_group == "distributed.env.NOT_LISTED"
    assert str(override.value()) == value


def test_knobs_that_change_nothing_make_no_other_setting(tmp_path: Path) -> None:
    for steps in (5, 25):
        train(tmp_path, {"training.max_steps": steps})
    (row,) = training_of(tmp_path).rows
    assert len(row.points) == 2
    for mb in (5.0, 25.0):
        train(tmp_path, {"distributed.strategy": "ddp", "distributed.bucket_cap_mb": mb})
    settings = {row.setting for row in training_of(tmp_path).rows}
    assert settings == {"defaults", "strategy=ddp", "strategy=ddp, bucket_cap_mb=5"}


def test_every_option_has_a_role() -> None:
    assert knobs_of(resolved("fsdp")).keys() == USUAL.keys() | {DEVICE}
    assert USUAL.keys() | {"runtime.multicast", "distributed.env", "training.max_steps"} <= ROLES.keys()
    assert not {"training.max_steps", "distributed.dp_size", "runtime.nodes"} & USUAL.keys()
    assert roles("training.batch_size") == {FLOOR, TRAINS_DIFFERENTLY}
    # The step without communication is the same.
    assert roles("training.learning_rate") == {TRAINS_DIFFERENTLY}
    assert roles("fsdp.forward_prefetch") == roles("runtime.max_connections") == {SCHEDULES}
    assert roles("compile.options.max_autotune") == roles("fsdp.replicas") == {FLOOR}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_defaults_are_the_workloads_own(device: str) -> None:
    of_workload = {f"training.{name}": value for name, value in TRAINING_ON[device].items()}
    assert NAMING.changed(knobs_of(resolved("fsdp", **of_workload, runtime={"device": device}))) == []
    on_cpu = NAMING.changed(knobs_of(resolved("fsdp", runtime={"device": "cpu"})))
    assert on_cpu == ["training.batch_size", "training.mixed_precision"]


@pytest.mark.parametrize(
    "changes",
    [{"ranking": {"num_layers": 4}}, {"model": {"hidden_size": 512}}, {"distributed.dp_size": 8}, {"device": "cpu"}],
    ids=["layers", "model", "ranks", "device"],
)
def test_what_is_another_model_or_machine_is_not_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    train(tmp_path)
    train(tmp_path, changes, step_us=100.0, environment={} if "device" in changes else ENVIRONMENT)
    analyses = analyse(STUDY, read_points(tmp_path).points)
    assert [len(analysis.rows) for analysis in analyses] == [1, 1]


def test_changes_begin_at_the_default(tmp_path: Path) -> None:
    for ahead in (2, 1, 0):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=1000.0 + ahead)
    for mode in ("BACKWARD_POST", None):
        train(tmp_path, {"fsdp.backward_prefetch": mode}, step_us=1100.0)
    found = {(one.knob, one.before, one.after) for one in effects(STUDY, training_of(tmp_path))}
    assert found == {
        *(("fsdp.forward_prefetch", before, after) for before, after in (("0", "1"), ("0", "2"), ("1", "2"))),
        *(("fsdp.backward_prefetch", "BACKWARD_PRE", after) for after in ("BACKWARD_POST", "null")),
        ("fsdp.backward_prefetch", "BACKWARD_POST", "null"),
    }


def test_the_median_of_all_pairs_comes_first_and_has_its_own_noise(tmp_path: Path) -> None:
    # Six pairs of a knob that helps by 2 to 4 percent, of which the largest lies beside the best.
    for warmup_steps, after_us in enumerate((970.0, 980.0, 969.0, 971.0, 970.0, 960.0)):
        knob = {"training.warmup_steps": warmup_steps}
        train(tmp_path, knob, step_us=1000.0, spread_us=40.0)
        train(tmp_path, {**knob, **PREFETCH}, step_us=after_us, spread_us=40.0)
    prefetch, *others = effects(STUDY, training_of(tmp_path))
    assert (prefetch.knob, prefetch.pairs) == ("fsdp.forward_prefetch", 6)
    assert prefetch.change == pytest.approx(-0.03)
    # Each pair has a noise of some 8 percent, and yet they agree.
    assert prefetch.noise < 0.01
    assert prefetch.change_text == "-3.0%"
    assert all("noise" in other.change_text for other in others)


def test_pairs_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    train(tmp_path, step_us=1000.0)
    train(tmp_path, PREFETCH, step_us=1500.0, host_us={"point": 1490.0})
    train(tmp_path, {"training.mixed_precision": "fp16"}, step_us=700.0, losses=[0.7, None])
    train(tmp_path, {"fsdp.forward_prefetch": 2}, step_us=900.0)
    train(tmp_path, {"fsdp.reshard_after_forward": False, "training.gradient_accumulation": 2}, step_us=900.0)
    analysis = training_of(tmp_path)
    found = [(one.knob, one.before, one.after) for one in effects(STUDY, analysis)]
    assert found == [("fsdp.forward_prefetch", "0", "2")]
    (table,) = effects_table(STUDY, analysis)
    (note,) = table.notes
    assert note.endswith(": reshard_after_forward, gradient_accumulation, mixed_precision.")


def test_the_reference_among_equally_simple_ones_is_the_smallest_number(tmp_path: Path) -> None:
    for size in (128, 96, 16):
        train(tmp_path, {"training.batch_size": size})
    assert training_of(tmp_path).reference.setting == "batch_size=16"


def rows_of(directory: Path) -> dict[str, FsdpRow]:
    return {row.setting: row for row in training_of(directory).rows}


def test_drift_cancels_where_the_floor_does_the_same(tmp_path: Path) -> None:
    # The machine was 1.5 times slower when it measured the second, which is the faster one.
    train(tmp_path, step_us=1500.0, none_us=2000.0, floor_us=1000.0)
    train(tmp_path, PREFETCH, step_us=1800.0, none_us=3000.0, floor_us=1500.0)
    times_us = {setting: row.time_us for setting, row in rows_of(tmp_path).items()}
    assert times_us == pytest.approx({"forward_prefetch=1": 1500.0, "defaults": 1875.0})
    assert {row.floor_us for row in rows_of(tmp_path).values()} == {1250.0}
    # Compiled, the step without communication is another.
    train(tmp_path, {"compile.enabled": True}, step_us=1400.0, none_us=1800.0, floor_us=700.0, compiled="inductor")
    rows = rows_of(tmp_path)
    assert (rows["compile=true"].time_us, rows["compile=true"].floor_us) == (1400.0, 700.0)
    assert rows["defaults"].floor_us == 1250.0


def test_what_the_host_limits_is_not_made_the_fastest(tmp_path: Path) -> None:
    # The host of the second is slower in every variant, so that its floor grew more than its step.
    host_us = dict.fromkeys(("point", "floor"), 300.0)
    train(tmp_path, step_us=1060.0, none_us=1200.0, floor_us=1000.0, host_us=host_us)
    host_us = {"point": 1190.0, "none": 1190.0, "floor": 1180.0}
    slow = {"distributed.enable_overlap": True}
    train(tmp_path, slow, step_us=1200.0, none_us=1400.0, floor_us=1190.0, host_us=host_us)
    train(tmp_path, PREFETCH, step_us=1105.0, none_us=1250.0, floor_us=1030.0)
    rows = rows_of(tmp_path)
    assert list(rows) == ["defaults", "forward_prefetch=1", "enable_overlap=true"]
    limited = rows["enable_overlap=true"]
    assert (limited.time_us, limited.floor_us, limited.times.relative) == (1200.0, 1190.0, False)
    # The other two share the median of their own floors.
    assert {row.floor_us for row in rows.values() if row.times.relative} == {1015.0}
    assert not [line for line in cautions(STUDY, training_of(tmp_path)) if line.startswith("Baselines drifted")]


@pytest.mark.parametrize(
    ("name", "relative"),
    [("NCCL_ALGO", True), ("RCCL_NUM_CHANNELS", True), ("TORCH_NCCL_HIGH_PRIORITY", True), ("OMP_NUM_THREADS", False)],
)
def test_only_variables_of_collectives_leave_the_floor_as_it_is(tmp_path: Path, name: str, relative: bool) -> None:
    train(tmp_path, step_us=1500.0, floor_us=1000.0)
    train(tmp_path, {"distributed.env": {name: "1"}}, step_us=1800.0, floor_us=1200.0)
    rows = rows_of(tmp_path)
    assert {row.times.relative for row in rows.values()} == {relative}
    assert rows[f"{name}=1"].time_us == pytest.approx(1650.0 if relative else 1800.0)


def test_points_of_equal_settings_say_how_far_two_may_be_apart(tmp_path: Path) -> None:
    for repetition, step_us in enumerate((1000.0, 1030.0, 1000.0, 970.0)):
        train(tmp_path, {"repetition": repetition}, step_us=step_us, spread_us=0.1)
    for ahead, step_us in ((1, 975.0), (2, 900.0)):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=step_us, spread_us=0.1)
    rows = rows_of(tmp_path)
    # One point says less than four.
    assert rows["forward_prefetch=1"].step.noise_us > 60.0 > rows["defaults"].step.noise_us
    assert not rows["forward_prefetch=1"].step.differs_from(rows["defaults"].step)
    assert rows["forward_prefetch=2"].step.differs_from(rows["defaults"].step)


@pytest.mark.parametrize(
    ("step_us", "host_us", "best"),
    [
        (975.0, 300.0, "defaults"),
        (955.0, 300.0, "forward_prefetch=1"),
        # The time of the host, which differs more from point to point.
        (900.0, 2000.0, "defaults"),
        (700.0, 2000.0, "forward_prefetch=1"),
    ],
)
def test_where_nothing_was_measured_twice_what_such_steps_are_known_to_vary_by_is_a_tie(
    tmp_path: Path, step_us: float, host_us: float, best: str
) -> None:
    host = dict.fromkeys(("point", "none", "floor"), host_us)
    train(tmp_path, step_us=1000.0, host_us=host)
    train(tmp_path, PREFETCH, step_us=step_us, host_us=host)
    analysis = training_of(tmp_path)
    assert analysis.best.setting == best
    assert analysis.reason.endswith("; not repeated")


def test_the_best_of_many_equal_settings_is_not_taken_for_better(tmp_path: Path) -> None:
    """Each of twenty is faster or slower by what one pair could not be by chance."""
    train(tmp_path, step_us=1000.0, spread_us=0.1)
    for ahead in range(1, 20):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=1000.0 + 31.0 * (-1) ** ahead, spread_us=0.1)
    assert training_of(tmp_path).best.setting == "defaults"


@pytest.mark.parametrize(
    ("second_us", "second_floor_us", "relative"),
    [
        # The whole machine was slower: the floor tells.
        (1650.0, 1100.0, True),
        # Only the floor was: dividing by it would put the points apart.
        (1500.0, 1100.0, False),
    ],
)
def test_floors_are_used_where_they_bring_equal_settings_together(
    tmp_path: Path, second_us: float, second_floor_us: float, relative: bool
) -> None:
    train(tmp_path, step_us=1500.0, floor_us=1000.0)
    train(tmp_path, {"repetition": 1}, step_us=second_us, floor_us=second_floor_us)
    train(tmp_path, PREFETCH, step_us=1400.0, floor_us=1000.0)
    analysis = training_of(tmp_path)
    assert {row.times.relative for row in analysis.rows} == {relative}
    assert how_timed(analysis).startswith("Times are relative" if relative else "Times are as measured")


def write_search(directory: Path, **changes: Any) -> None:
    """A search that proved what the table alone would not call the fastest."""
    known: dict[str, Any] = {
        **{"label": "ranking fsdp2 step on 4 ranks", "overrides": ["workload=fsdp"], "knobs": {}},
        **{"best": {"fsdp.forward_prefetch": "1"}, "best_points": ["fsdp_1"], "baseline_points": ["fsdp_0"]},
        **{"time_us": 1200.0, "baseline_us": 1500.0, "gain": Gain(0.2, 0.03), "proven": True},
    }
    KnobRecord(searches=[KnobSearch(**{**known, **changes})]).write(directory)


@pytest.mark.parametrize(
    ("changes", "best", "proven"),
    [
        ({}, "forward_prefetch=1", True),
        # Points of another size, or that are not there; without an answer; nothing was faster.
        ({"best_points": ["fsdp_3"]}, "forward_prefetch=2", False),
        ({"best_points": ["fsdp_9"]}, "forward_prefetch=2", False),
        ({"time_us": None}, "forward_prefetch=2", False),
        ({"best": {}, "best_points": ["fsdp_0"], "gain": None}, "defaults", False),
        ({"best": {}, "best_points": ["fsdp_0"], "gain": None, "stopped": "out of budget"}, "defaults", False),
    ],
)
def test_searches_settle_what_they_measured(tmp_path: Path, changes: dict[str, Any], best: str, proven: bool) -> None:
    for ahead, step_us in enumerate((1500.0, 1200.0, 1100.0)):
        train(tmp_path, {"fsdp.forward_prefetch": ahead}, step_us=step_us)
    train(tmp_path, {"ranking.num_layers": 2})
    write_search(tmp_path, **changes)
    _, analysis = analyse(STUDY, read_points(tmp_path).points, read_records(tmp_path).knobs)
    assert (analysis.best.setting, analysis.proven) == (best, proven)


def test_a_record_that_says_no_gain_is_a_problem(tmp_path: Path) -> None:
    write_search(tmp_path)
    record = json.loads((tmp_path / KnobRecord.FILE).read_text())
    record["searches"][0]["gain"] = None
    (tmp_path / KnobRecord.FILE).write_text(json.dumps(record))
    records = read_records(tmp_path)
    assert not records.knobs
    assert "without its gain" in records.problems[0]
