"""Roles of options, and what searches decide. Which setting trains fastest, and what each knob contributed:
answers/fsdp, made/training_doubts, made/every_workload and fsdp among the golden files."""

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
from overlap_sweep.workloads.fsdp.config import TRAINING_ON
from overlap_sweep.workloads.fsdp.rows import DEVICE, NAMING, ROLES, USUAL, knobs_of, roles
from overlap_sweep.workloads.fsdp.study import STUDY
from tests.make_point import resolved
from tests.results.reading import train, training_of


@pytest.mark.parametrize("value", ["Ring", "8", "LL,Simple", "a b", "null", 'a"b\\', "^x:y=$z", "0x1;#"])
def test_the_best_can_be_pasted(tmp_path: Path, value: str) -> None:
    train(tmp_path, step_us=1500.0)
    train(tmp_path, {"distributed.env": {"NOT_LISTED": value}}, step_us=1000.0)
    (typed,) = shlex.split(STUDY.to_use(training_of(tmp_path)))
    override = OverridesParser.create().parse_override(typed)
    assert override.is_force_add()
    assert override.key_or_group == "distributed.env.NOT_LISTED"
    assert str(override.value()) == value


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
