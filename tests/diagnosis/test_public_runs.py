"""Verdicts on runs that nobody here wrote, and on recordings with planted defects, hold: see tests/data/judged."""

from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
import yaml

from overlap_sweep.diagnosis import NEVER, Diagnosis, Finding, StepLoss
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.facts import RankFacts, read_rank
from overlap_sweep.diagnosis.runs import diagnose
from tests.diagnosis.independent_judge import judge, traces_in
from tests.diagnosis.planted import unpack

JUDGED = Path(__file__).parent.parent / "data" / "judged"
BRIEF = ("own/alternating_work", "own/all_to_all_rank1_late", "own/host_function_in_stream", "own/pipeline")
"""Of the project's own recordings, those that say something different each; to judge the others would take seconds."""

LISTED_FIRST = 5
"""Findings among which the main causes must be."""

LEAVE_US = 30
"""Most that ranks leave a call apart, or that their clocks differ: arrivals show it, and lengths of kernels do not."""


class Judged(msgspec.Struct, forbid_unknown_fields=True, frozen=True, eq=False):
    """What is true of a run. README.md beside the file explains the fields."""

    run: str
    ranks: str
    why: str
    first: list[dict[str, Any]]
    figures: dict[str, int]
    collectives: dict[str, int]
    files: str = ""
    also: list[dict[str, Any]] = []
    says: list[str] = []
    never: list[str] = []
    left_out: list[int] = []
    late: dict[int, tuple[int, int]] = {}

    @property
    def is_own(self) -> bool:
        """Returns whether this project recorded it."""
        return self.run.startswith("own/")


RUNS = msgspec.convert(yaml.safe_load((JUDGED / "verdicts.yaml").read_text())["runs"], list[Judged])


def cases(runs: list[Judged]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("judged", runs, ids=[each.run for each in runs])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    unpack(JUDGED / "h100x2.tar.xz", directory)
    return directory


@cache
def traces(judged: Judged, own: Path) -> list[Path]:
    directory = own / judged.run.removeprefix("own/") if judged.is_own else JUDGED / "public" / judged.run
    if not directory.exists():
        pytest.skip("python benchmarks/fetch_public_traces.py fetches it")
    return traces_in(directory)


@cache
def diagnosed(judged: Judged, own: Path) -> Diagnosis:
    (found,) = diagnose(traces(judged, own))
    return found


@cache
def read(judged: Judged, own: Path) -> list[RankFacts]:
    facts = [facts for path in traces(judged, own) if (facts := read_rank(path).facts)]
    return sorted(facts, key=lambda rank: rank.rank or 0)


@cases([each for each in RUNS if not each.is_own or each.run in BRIEF])
def test_verdicts_have_what_the_script_measures(judged: Judged, own: Path) -> None:
    found = judge(traces(judged, own), frozenset(judged.left_out))
    assert f"{len(found.ranks)} of {found.world_size or 1}" == judged.ranks
    assert {name: count for name, count in found.collectives.items() if count} == judged.collectives
    measured = {name: found.worst(name) for name in judged.figures if name != "transfer_us"}
    if found.transfer_us is not None:
        measured["transfer_us"] = found.transfer_us
    assert measured == pytest.approx(judged.figures, abs=0.51)
    for rank, (calls, cost_us) in judged.late.items():
        assert (found.late[rank].calls, round(found.late[rank].cost_us)) == (calls, cost_us)


@cases(RUNS)
def test_times_are_those_of_the_independent_script(judged: Judged, own: Path) -> None:
    by_rank: dict[int | None, list[StepLoss]] = defaultdict(list)
    for step in diagnosed(judged, own).steps:
        if not step.startup:
            by_rank[step.rank].append(step)
    found = {
        theirs: max(median(getattr(step, ours) for step in steps) for steps in by_rank.values())
        for theirs, ours in {"comm_us": "comm_us", "exposed_us": "exposed_comm_us", "idle_us": "idle_us"}.items()
    }
    assert {step.step for step in diagnosed(judged, own).steps if step.startup} == set(judged.left_out)
    measured = {name: judged.figures[name] for name in found}
    # What a step begins and ends with may be counted to either side.
    assert found == pytest.approx(measured, rel=0.01, abs=0.005 * judged.figures["step_us"])


@cases([each for each in RUNS if each.collectives])
def test_collectives_are_those_of_the_independent_script(judged: Judged, own: Path) -> None:
    pairs = {"send": "send_recv", "recv": "send_recv"}
    calls = [call for call in read(judged, own)[0].calls if not call.is_wait]
    found = Counter(pairs.get(call.collective, call.collective) for call in calls)
    known = Counter({name: count for name, count in judged.collectives.items() if name != "unknown"})
    assert found & known == known
    # Launched before the recording, of which nothing says what they were.
    assert (found - known).total() == judged.collectives.get("unknown", 0)


@cases([each for each in RUNS if each.figures.get("waiting_us")])
def test_waiting_and_transfer_are_those_of_the_independent_script(judged: Judged, own: Path) -> None:
    facts = read(judged, own)
    arrived = arrivals(facts)
    counted = [step.number for step in facts[0].steps if step.number not in judged.left_out]
    waited: dict[int, Counter[int]] = defaultdict(Counter)
    moved: Counter[int] = Counter()
    for match in arrived.matches:
        ends = []
        for rank, index in match:
            call, last_ns = facts[rank].calls[index], int(arrived.last_ns[rank][index])
            assert last_ns != NEVER
            waited[rank][call.step] += max(0, min(last_ns, call.end_ns) - call.start_ns)
            ends.append(call.end_ns - last_ns)
        moved[facts[match[0][0]].calls[match[0][1]].step] += max(0, min(ends))
    waiting_us = max(median(by_step[step] for step in counted) for by_step in waited.values()) / 1e3
    transfer_us = median(moved[step] for step in counted) / 1e3
    near = 0.04 * judged.figures["comm_us"] + LEAVE_US * len(arrived.matches) / len(facts[0].steps)
    assert waiting_us == pytest.approx(judged.figures["waiting_us"], abs=near)
    assert transfer_us == pytest.approx(judged.figures["transfer_us"], abs=near)


@cases(RUNS)
def test_the_main_cause_comes_first(judged: Judged, own: Path) -> None:
    findings = diagnosed(judged, own).findings
    assert not judged.first or any(is_(findings[0], wanted) for wanted in judged.first), findings[0]
    for wanted in judged.also:
        assert any(is_(finding, wanted) for finding in findings[:LISTED_FIRST]), (wanted, findings)


@cases([each for each in RUNS if each.says or each.never])
def test_advice_fits(judged: Judged, own: Path) -> None:
    findings = diagnosed(judged, own).findings
    first = "\n".join(f"{each.where} {each.evidence} {each.try_}" for each in findings[:LISTED_FIRST])
    advice = "\n".join(f"{each.evidence} {each.try_}" for each in findings)
    assert [word for word in judged.says if word not in first] == []
    assert [word for word in judged.never if word in advice] == []


def is_(finding: Finding, wanted: dict[str, Any]) -> bool:
    """Returns whether this is what was judged; times within 5 %."""
    return all(
        getattr(finding, name) == (pytest.approx(value, rel=0.05) if name == "lost_us" else value)
        for name, value in wanted.items()
    )
