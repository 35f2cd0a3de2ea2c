"""Verdicts on runs that nobody here wrote, and on recordings with planted defects, hold: see tests/data/judged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from overlap_sweep.diagnosis import NEVER, Diagnosis, Finding
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.runs import diagnose, read_rank
from tests.diagnosis.judged import OWN, Judged, cases, verdicts
from tests.diagnosis.planted import unpack

RUNS = verdicts().runs
LISTED_FIRST = 5
"""Findings among which the main causes must be."""

LEAVE_US = 30
"""Most that ranks leave a call apart, or that their clocks differ: arrivals show it, and lengths of kernels do not."""

Diagnosed = Callable[[Judged], Diagnosis]
Read = Callable[[Judged], list[RankFacts]]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    unpack(OWN, directory)
    return directory


@pytest.fixture(scope="module")
def diagnosed(own: Path) -> Diagnosed:
    found: dict[str, Diagnosis] = {}

    def of(judged: Judged) -> Diagnosis:
        if judged.run not in found:
            (found[judged.run],) = diagnose(judged.traces(own))
        return found[judged.run]

    return of


@pytest.fixture(scope="module")
def read(own: Path) -> Read:
    found: dict[str, list[RankFacts]] = {}

    def of(judged: Judged) -> list[RankFacts]:
        if judged.run not in found:
            facts = [facts for path in judged.traces(own) if (facts := read_rank(path).facts)]
            found[judged.run] = sorted(facts, key=lambda rank: rank.rank or 0)
        return found[judged.run]

    return of


@cases(RUNS)
def test_times_are_those_of_the_independent_script(judged: Judged, diagnosed: Diagnosed) -> None:
    by_rank: dict[int | None, list[Any]] = defaultdict(list)
    for step in diagnosed(judged).steps:
        if not step.startup:
            by_rank[step.rank].append(step)
    found = {
        ours: max(median(getattr(step, own) for step in steps) for steps in by_rank.values())
        for ours, own in {"comm_us": "comm_us", "exposed_us": "exposed_comm_us", "idle_us": "idle_us"}.items()
    }
    assert {step.step for step in diagnosed(judged).steps if step.startup} == set(judged.left_out)
    measured = {name: judged.figures[name] for name in found}
    # What a step begins and ends with may be counted to either side.
    assert found == pytest.approx(measured, rel=0.01, abs=0.005 * judged.figures["step_us"])


@cases([each for each in RUNS if each.collectives])
def test_collectives_are_those_of_the_independent_script(judged: Judged, read: Read) -> None:
    pairs = {"send": "send_recv", "recv": "send_recv"}
    found = Counter(pairs.get(call.collective, call.collective) for call in read(judged)[0].calls if not call.is_wait)
    known = Counter({name: count for name, count in judged.collectives.items() if name != "unknown"})
    # Launched before the recording, of which nothing tells what they were.
    others = found - known
    assert found & known == known
    assert others.total() == judged.collectives.get("unknown", 0)


@cases([each for each in RUNS if each.figures.get("waiting_us")])
def test_waiting_and_transfer_are_those_of_the_independent_script(judged: Judged, read: Read) -> None:
    facts = read(judged)
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
    waiting_us = max(median(own[step] for step in counted) for own in waited.values()) / 1e3
    transfer_us = median(moved[step] for step in counted) / 1e3
    near = 0.04 * judged.figures["comm_us"] + LEAVE_US * len(arrived.matches) / len(facts[0].steps)
    assert waiting_us == pytest.approx(judged.figures["waiting_us"], abs=near)
    assert transfer_us == pytest.approx(judged.figures["transfer_us"], abs=near)


@cases(RUNS)
def test_the_main_cause_comes_first(judged: Judged, diagnosed: Diagnosed) -> None:
    findings = diagnosed(judged).findings
    assert not judged.first or any(is_(findings[0], wanted) for wanted in judged.first), told(findings)
    for wanted in judged.also:
        assert any(is_(finding, wanted) for finding in findings[:LISTED_FIRST]), (wanted, told(findings))


@cases([each for each in RUNS if each.says or each.never])
def test_advice_fits(judged: Judged, diagnosed: Diagnosed) -> None:
    findings = diagnosed(judged).findings
    first = "\n".join(f"{each.where} {each.evidence} {each.try_}" for each in findings[:LISTED_FIRST])
    advice = "\n".join(f"{each.evidence} {each.try_}" for each in findings)
    for word in judged.says:
        assert word in first
    for word in judged.never:
        assert word not in advice


def is_(finding: Finding, wanted: dict[str, Any]) -> bool:
    """Returns whether this is what was judged; times within 5 %."""
    return all(
        getattr(finding, name) == (pytest.approx(value, rel=0.05) if name == "lost_us" else value)
        for name, value in wanted.items()
    )


def told(findings: list[Finding]) -> list[str]:
    return [f"{each.cause} {each.collective} rank {each.rank} {each.lost_us:.0f} us" for each in findings]
