"""From the values of the knobs to what the slots of each pass may be given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from overlap_sweep import backends, space, workloads
from overlap_sweep.backends import transformer_engine
from overlap_sweep.search.candidates import Choices, candidates
from overlap_sweep.search.cell import Candidate
from tests.points import gpu_point, operator_point

ALL = ("ring_exchange", "bulk", "pipeline")
KNOBS: dict[str, Sequence[Any]] = {**dict.fromkeys(space.KNOBS, (None,)), "num_sm": (1, 16)}


@pytest.fixture(autouse=True)
def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)


def found(
    point: Mapping[str, Any], methods: Sequence[str] = ALL, phase: str = "all", **knobs: Sequence[Any]
) -> tuple[dict[str, list[Candidate]], Counter[str]]:
    backend, workload = backends.load(point["backend"]), workloads.load("operator")
    return candidates(
        point["operator"],
        Choices(methods, {**KNOBS, **knobs}, phase),
        backend.default_knobs,
        backend.knobs(point),
        lambda phases: workload.refusal({**point, "phases": phases}),
    )


def names(of_pass: Sequence[Candidate]) -> list[str]:
    return [str(candidate) for candidate in of_pass]


@pytest.mark.parametrize("operator", ["fc1", "qkv", "proj", "fc2"])
def test_every_slot_gets_the_methods_that_it_takes(operator: str) -> None:
    """wgrad has nothing beside a dgrad that scatters, which is no refusal worth a word: no one asked for it."""
    of_pass, refused = found(operator_point(operator=operator))
    forward, backward = {"ring_exchange"}, {"ring_exchange", "pipeline", "bulk", "bulk+bulk", "+bulk"}
    if operator in ("proj", "fc2"):
        forward, backward = {"ring_exchange", "pipeline"}, {"ring_exchange"}

    def methods(candidate: Candidate) -> str:
        phases = ("fprop",) if "fprop" in str(candidate.slots) else ("dgrad", "wgrad")
        given = [candidate.settings.get(f"{operator}_{phase}", {}).get("method", "") for phase in phases]
        return "+".join(given) if given[1:] and given[1] else given[0]

    assert {methods(c) for c in of_pass["fwd"]} == forward
    assert {methods(c) for c in of_pass["bwd"]} == backward
    assert not refused


def test_backward_is_a_product_of_its_slots_both_before_one() -> None:
    of_pass, _ = found(operator_point(), methods=["bulk"])
    assert of_pass["fwd"] == []
    assert names(of_pass["bwd"]) == [
        *("dgrad bulk_sm1 + wgrad bulk_sm1", "dgrad bulk_sm1 + wgrad bulk_sm16", "dgrad bulk_sm1"),
        *("dgrad bulk_sm16 + wgrad bulk_sm1", "dgrad bulk_sm16 + wgrad bulk_sm16", "dgrad bulk_sm16"),
        *("wgrad bulk_sm1", "wgrad bulk_sm16"),
    ]
    assert [set(c.settings) for c in of_pass["bwd"][-2:]] == [{"fc1_wgrad"}] * 2


@pytest.mark.parametrize("phase", space.PHASES)
def test_a_single_phase_leaves_the_others_without_overlap(phase: str) -> None:
    of_pass, _ = found(operator_point(), phase=phase)
    assert {slot for of_each in of_pass.values() for c in of_each for slot in c.settings} == {f"fc1_{phase}"}


def test_only_knobs_that_the_method_has_there_are_varied() -> None:
    knobs = {"num_splits": (2, 4), "aggregate": (False, True)}
    of_pass, _ = found(operator_point(operator="fc2"), **knobs)
    assert names(of_pass["fwd"]) == [
        *("ring_sm1", "ring_sm16"),
        *(f"pipeline_sm{n}_split{splits}" for n in (1, 16) for splits in (2, 4)),
    ]
    assert names(of_pass["bwd"]) == [f"ring_agg{agg}_sm{n}" for n in (1, 16) for agg in (0, 1)]


def test_only_knobs_that_the_backend_has_are_varied() -> None:
    knobs = {"set_sm_margin": (False, True), "use_ce": (False,), "cga_size": (1, 2)}
    of_pass, refused = found(operator_point(), methods=["bulk"], phase="dgrad", **knobs)
    assert names(of_pass["bwd"]) == ["dgrad bulk_sm1", "dgrad bulk_sm16"]
    of_pass, _ = found(gpu_point(), methods=["bulk"], phase="dgrad", **knobs)
    assert len(of_pass["bwd"]) == 2 * 2 * 2
    assert not refused


def test_a_knob_that_is_left_open_is_what_the_backend_gives_it() -> None:
    of_pass, _ = found(gpu_point(), methods=["bulk"], phase="dgrad")
    usual = {"method": "bulk", **space.USERBUFFERS_DEFAULTS["bulk"]}
    assert [c.settings["fc1_dgrad"] for c in of_pass["bwd"]] == [{**usual, "num_sm": n} for n in (1, 16)]


def test_copy_engines_make_one_of_all_num_sm() -> None:
    of_pass, _ = found(gpu_point(), methods=["ring_exchange"], phase="fprop", use_ce=(True, False), num_sm=(1, 4, 16))
    given = [c.settings["fc1_fprop"] for c in of_pass["fwd"]]
    assert [setting["num_sm"] for setting in given if setting["use_ce"]] == [1]
    assert [setting["num_sm"] for setting in given if not setting["use_ce"]] == [1, 4, 16]


def test_every_candidate_occurs_once() -> None:
    of_pass, _ = found(gpu_point(), num_sm=(1, 2, 16), use_ce=(True, False, True), num_splits=(4, 4))
    for of_each in of_pass.values():
        assert len(of_each) == len(set(of_each))


def test_refusals_are_counted_by_their_reason() -> None:
    of_pass, refused = found(gpu_point(operator="fc2"), methods=["pipeline"], num_splits=(4, 3), num_sm=(1, 16, 40))
    assert names(of_pass["fwd"]) == ["pipeline_sm1_split4", "pipeline_sm16_split4"]
    assert refused == {
        "fc2_fprop: 256 columns cannot be cut into num_splits=3 equal parts": 3,
        "fc2_fprop: num_sm=40 is more than the 32 that userbuffers take": 1,
    }


@pytest.mark.parametrize(
    ("operator", "tp_size", "says"), [("qkv", 8, "heads do not divide"), ("fc1", 1, "tp_size=1 communicates nothing")]
)
def test_where_the_operator_cannot_be_cut_or_is_not_everything_is_refused(
    operator: str, tp_size: int, says: str
) -> None:
    of_pass, refused = found(operator_point(operator=operator, tp_size=tp_size))
    assert of_pass == {"fwd": [], "bwd": []}
    (reason,) = refused
    assert says in reason
