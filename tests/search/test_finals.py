"""The end of hydra/sweeper=knobs: the best settings of searches that compete, side by side, with results made up."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.report.searches import knob_lines
from overlap_sweep.results.records import KnobFinal, KnobRecord
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search.knob_sweeper import sweep
from overlap_sweep.study.words import headline
from tests.make_point import falling, made_result
from tests.results.reading import stacks_of
from tests.search.stand_in import StandIn, sweep_of

pytestmark = pytest.mark.end_to_end

PARAMS = {"tp_training.zero_stage": "1,2", "tp_training.sequence_parallel": "null,true"}
FIXED = (
    *("workload=tp_training", "model=qwen3_tiny", "runtime.device=cpu", "profile=none", "search.repeats=2"),
    *("tp_training.num_training_steps=7", "tp_training.warmup_steps=2", "tp_training.compile=false"),
)
Answer = Callable[[Mapping[str, Any]], Result]


def result(point: Mapping[str, Any], step_us: float, **changed: Any) -> Result:
    run = {"step_us": step_us, "spread_us": 0.002 * step_us, "objective_us": step_us, "started": None}
    return made_result("tp_training", point, **run, **changed)


def stacks(point: Mapping[str, Any]) -> Result:
    """fsdp_dtensor is slower with its defaults, and faster with its sequence cut."""
    training = point["tp_training"]
    if point["impl"] == "autotp":
        return result(point, 9_000.0 - 1_000 * (training["zero_stage"] == 2))
    return result(point, 10_000.0 - 3_000 * training["sequence_parallel"])


def searched(directory: Path, answer: Answer, *overrides: str) -> StandIn:
    single = [override for override in (*FIXED, *overrides) if "," not in override]
    with sweep_of(directory, "hydra/sweeper=knobs", *single, answer=answer) as launcher:
        sweep(launcher.inputs(*FIXED, *overrides, params=PARAMS))
        return launcher


def final_of(directory: Path) -> KnobFinal:
    (found,) = KnobRecord.read(directory / KnobRecord.FILE).finals
    return found


def test_each_stack_competes_at_its_best_settings(tmp_path: Path) -> None:
    launcher = searched(tmp_path, stacks, "tp_size=2", "impl=autotp,fsdp_dtensor,async_tp")
    final = final_of(tmp_path)
    fsdp, autotp = (f"qwen3_tiny {impl} TP=2 DP=1 step on 2 ranks" for impl in ("fsdp_dtensor", "autotp"))
    best = {(one.label, *one.changed.values()): one.place for one in final.finalists}
    assert best == {(fsdp, "true"): "fastest", (autotp, "2"): "", (autotp,): "", (fsdp,): ""}
    assert [round(one.time_us, -2) for one in final.finalists] == [7_000, 8_000, 9_000, 10_000]
    assert final.left_out == {
        "qwen3_tiny async_tp TP=2 DP=1 step on 2 ranks": "impl=async_tp requires GPUs; use impl=fsdp_dtensor"
    }
    # In two rounds, the second in the opposite order, by points that no search has chosen by.
    assert [[point["impl"] for point in batch] for batch in launcher.batches[-4:]] == [
        *(["autotp"] * 2, ["fsdp_dtensor"] * 2),
        *(["fsdp_dtensor"] * 2, ["autotp"] * 2),
    ]
    assert (final.rounds, {len(one.points) for one in final.finalists}, final.work_of) == (2, {2}, "")
    lines = knob_lines(KnobRecord.read(tmp_path / KnobRecord.FILE))
    (said,) = (line for line in lines if line.startswith("Side by side"))
    assert said.startswith(f"Side by side, 2 rounds: {fsdp} is the fastest, ")
    assert f"than {autotp} (" in said
    (command,) = [line for line in lines if line.startswith("  python launch.py") and "impl=fsdp_dtensor" in line][-1:]
    assert command.endswith("tp_training.sequence_parallel=true")
    # It has the last word in the report.
    (analysis,) = stacks_of(tmp_path)
    assert headline(analysis).startswith("Use impl=fsdp_dtensor, sequence_parallel=true: ")
    assert "faster per token and GPU than impl=autotp, zero_stage=2 (" in headline(analysis)
    assert searched(tmp_path, stacks, "tp_size=2", "impl=autotp,fsdp_dtensor,async_tp").points == []
    assert final_of(tmp_path) == final


def test_grids_of_as_many_ranks_compete_by_the_time_of_as_many_tokens(tmp_path: Path) -> None:
    """Twice the tokens in 1.5 times the time."""
    searched(tmp_path, lambda point: result(point, 5_000.0 * (1 + point["dp_size"])), "ranks=2", "tp_size=1,2")
    first, *others = final_of(tmp_path).finalists
    assert (first.label, first.place) == ("qwen3_tiny fsdp_dtensor TP=1 DP=2 step on 2 ranks", "fastest")
    assert {(one.label, one.place) for one in others} == {("qwen3_tiny fsdp_dtensor TP=2 DP=1 step on 2 ranks", "")}
    assert others[0].time_us / first.time_us == pytest.approx(2 / 1.5, rel=0.01)
    assert final_of(tmp_path).work_of == first.label


def test_settings_with_other_losses_have_failed_and_stacks_with_other_losses_don_t_win(tmp_path: Path) -> None:
    def wrong(point: Mapping[str, Any]) -> Result:
        lost = point["tp_training"]["sequence_parallel"]
        times = 1.1 if lost else 1.0
        return result(point, 10_000.0 - 3_000 * lost, losses=falling(times=times))

    searched(tmp_path / "setting", wrong, "tp_size=2", "impl=autotp,fsdp_dtensor")
    record = KnobRecord.read(tmp_path / "setting" / KnobRecord.FILE)
    of_fsdp = record.searches[1]
    assert (of_fsdp.best, of_fsdp.dropped) == ({}, "")
    assert any("sequence_parallel=true failed: loss is 7.7 instead of 7 at step 0" in note for note in of_fsdp.notes)

    def disagree(point: Mapping[str, Any]) -> Result:
        return result(point, 10_000.0, losses=falling(times=1.1 if point["impl"] == "autotp" else 1.0))

    searched(tmp_path / "stacks", disagree, "tp_size=2", "impl=autotp,fsdp_dtensor")
    final = final_of(tmp_path / "stacks")
    assert {one.place for one in final.finalists} == {""}
    assert all("instead of" in one.deviation for one in final.finalists)
    lines = knob_lines(KnobRecord.read(tmp_path / "stacks" / KnobRecord.FILE))
    assert "Side by side, 2 rounds: no winner, since all deviate" in lines


def test_a_budget_leaves_room_for_the_end(tmp_path: Path) -> None:
    searched(tmp_path, stacks, "tp_size=2", "impl=autotp,fsdp_dtensor", "search.max_points=14")
    final = final_of(tmp_path)
    assert final.finalists
    assert KnobRecord.read(tmp_path / KnobRecord.FILE).points <= 14


@pytest.mark.parametrize("max_points", [6, 10, 11])
def test_a_budget_that_ends_before_the_first_round_does_names_no_winner(max_points: int, tmp_path: Path) -> None:
    searched(tmp_path, stacks, "tp_size=2", "impl=autotp,fsdp_dtensor", f"search.max_points={max_points}")
    record = KnobRecord.read(tmp_path / KnobRecord.FILE)
    (final,) = record.finals
    assert (final.rounds, final.finalists) == (0, [])
    lines = knob_lines(record)
    assert "Side by side: not compared" in lines
    assert f"  Stopped early: search.max_points={max_points} is used up." in lines
