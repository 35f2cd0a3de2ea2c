"""Waiting for late ranks, and what is transfer: who is late, how often, and why."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.facts import read_rank
from overlap_sweep.diagnosis.groups import group_rows
from overlap_sweep.diagnosis.losses import losses_of, views_of
from overlap_sweep.trace.intervals import Measure, intersect, merge, subtract
from tests.timeline import Timeline, diagnosed, findings

TRACES = Path(__file__).parent.parent / "data" / "traces"


def in_turn(late_us: Sequence[Sequence[float]], *, host: bool = False) -> list[Timeline]:
    """All-reduces of 400 us, each after a GEMM; the work of `late_us[call][rank]` more makes a rank late."""
    ranks = []
    for rank in range(len(late_us[0])):
        made = Timeline(rank, len(late_us[0]))
        for step in range(2):
            now = 100_000.0 * step
            made.step(step, now - 2000, now + 90_000)
            for late in late_us:
                own = now + 1000 + (0 if host else late[rank])
                starts, ends = now + 1000 + late[rank], now + 1400 + max(late)
                made.kernel(now, own, launch=now - 300)
                launch = starts - 5 if host and late[rank] else now + 100
                made.collective("all_reduce", starts, ends, launch=launch, ranks=range(len(late)))
                now = ends
            made.kernel(now, now + 1000, launch=now - 300)
        ranks.append(made)
    return ranks


@pytest.mark.parametrize("host", [False, True])
def test_ranks_that_are_late_in_turn(tmp_path: Path, host: bool) -> None:
    ranks = in_turn([(2000, 0), (0, 1500), (2000, 0), (0, 1500)], host=host)
    found = findings(tmp_path, *ranks)
    straggler, dependency = found["straggler"], found["dependency"]
    assert (straggler.lost_us, straggler.rank) == (4000, None)
    assert (straggler.waiting_us, straggler.transfer_us) == (4000, 800)
    assert "rank 0 causes 57% (the last in 4 of 8 collectives" in straggler.evidence
    assert "rank 1 43% (the last in 4 of 8 collectives" in straggler.evidence
    assert ("its host launches late" if host else "it computes longer") in straggler.evidence
    assert (dependency.lost_us, dependency.waiting_us, dependency.transfer_us) == (1600, 4000, 1600)
    facts = [rank.facts(tmp_path) for rank in ranks]
    [row] = group_rows(facts, arrivals(facts))
    assert (row.transfer_us, row.skew_us) == (400, 1750)


def test_nobody_in_particular_is_late_by_little(tmp_path: Path) -> None:
    late = [tuple(100.0 * (call == rank) for rank in range(12)) for call in range(12)]
    found = findings(tmp_path, *in_turn(late))
    assert found["straggler"].lost_us == 1100
    assert "None of 12 ranks causes 10% of it" in found["straggler"].evidence


def test_a_rank_that_is_always_late_is_named(tmp_path: Path) -> None:
    found = findings(tmp_path, *in_turn([(0, 900), (100, 0), (0, 900), (0, 900)]))
    assert (found["straggler"].lost_us, found["straggler"].rank) == (2700, 1)
    assert "the last in 6 of 8 collectives" in found["straggler"].evidence


def test_the_root_is_who_kept_the_late_rank_waiting(tmp_path: Path) -> None:
    # Rank 2 computes 3,000 us more. Rank 1 waits for it in one group, and so comes late to rank 0's.
    ranks = [Timeline(rank, 3) for rank in range(3)]
    for rank, made in enumerate(ranks):
        for step in range(3):
            start = 20_000 * step
            made.step(step, start - 2000, start - 1000)
            more = 3000 * (rank == 2)
            made.kernel(start, start + 1000 + more, launch=start - 1500)
            if rank:
                made.collective("all_reduce", start + 1000 + more, start + 4400, start - 1400, group="1", ranks=(1, 2))
            if rank < 2:
                after = 3500 * rank
                if rank:
                    made.kernel(start + 4400, start + 4500, launch=start - 1350)
                made.collective("all_reduce", start + 1000 + after, start + 4900, start - 1300, group="2", ranks=(0, 1))
            made.kernel(start + 4900, start + 6000, launch=start - 1200)
    found = [one for one in diagnosed(tmp_path, *ranks).findings if one.cause == "straggler"]
    assert [(one.rank, one.lost_us) for one in found] == [(2, 3000), (None, 500)]
    assert "take it 3,000 us longer" in found[0].evidence


def test_a_rank_that_is_late_where_its_recording_begins(tmp_path: Path) -> None:
    ranks = [Timeline(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        made.step(0, -2000, 9000)
        made.kernel(3000 * rank, 3000 * rank + 1000, launch=-1500)
        made.collective("all_reduce", 3000 * rank + 1000, 4400, launch=-1400)
        made.kernel(4400, 6000, launch=-1300)
    straggler = findings(tmp_path, *ranks)["straggler"]
    assert (straggler.lost_us, straggler.rank) == (3000, 1)
    assert "late by 3,000 us where its recording begins" in straggler.evidence
    assert "record more steps" in straggler.try_


def test_only_exposed_waiting_counts(tmp_path: Path) -> None:
    ranks = [Timeline(rank) for rank in range(2)]
    for rank, made in enumerate(ranks):
        for step in range(2):
            start = 10_000 * step
            made.step(step, start - 2000, start - 1000)
            made.collective("all_reduce", start + 2000 * rank, start + 3000, launch=start - 1500)
            made.kernel(start, start + 2500, launch=start - 1400)
            made.kernel(start + 3000, start + 5000, launch=start - 1300)
    found = findings(tmp_path, *ranks)
    assert "straggler" not in found
    assert (found["bandwidth"].waiting_us, found["bandwidth"].transfer_us) == (0, 500)


def test_no_rank_loses_more_in_a_step_than_there_is(directories: dict[str, Path]) -> None:
    planted = [run for directory in directories.values() for run in directory.iterdir() if run.is_dir()]
    names = {path.name.split("_rank")[0] for path in TRACES.glob("*_rank*.json.gz")}
    runs = [sorted(run.glob("trace_rank*.json")) for run in planted]
    runs += [sorted(TRACES.glob(f"{name}_rank*.json.gz")) for name in names]
    seen: Counter[str] = Counter()
    for paths in runs:
        facts = [one.facts for one in map(read_rank, paths) if one.facts]
        exposures = [exposure_of(own) for own in facts]
        for view in views_of(facts, exposures, arrivals(facts)):
            lost: Counter[int] = Counter()
            for loss in losses_of(view):
                seen[loss.cause] += 1
                is_slower_gemm = loss.cause == "contention" or "slowed_ns" in loss.numbers
                if not is_slower_gemm and not (loss.cause == "dependency" and "blocked_ns" in loss.numbers):
                    # What the program makes the backward pass wait for is lost to `issued_late`, too.
                    lost[loss.step] += round(loss.lost_ns)
            alone = merge(np.concatenate((view.exposure.comm.union, view.facts.copies)))
            idle, exposed = subtract(view.exposure.gaps, alone), intersect(view.exposure.gaps, view.exposure.comm.union)
            most = Measure(np.concatenate((idle, exposed)))
            first = {step.number: step.start_ns for step in view.facts.steps}
            # A wait that a step begins with, such as a barrier, runs before the step's first work.
            early = {call.step for call in view.facts.calls if call.start_ns < first.get(call.step, 0)}
            for step in view.facts.steps:
                if not {step.number, step.number + 1} & early:
                    assert lost[step.number] <= most.between(step.start_ns, step.end_ns) + 1000, (paths, step.number)
            assert lost.total() <= most.between(min(first.values()), view.facts.steps[-1].end_ns) + 1000, paths
    assert seen["straggler"] > 100
    assert seen["dependency"] > 100
