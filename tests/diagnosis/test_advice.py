"""Every cause has all that a cause needs: a meaning in help and docs, evidence, rules, and advice whose conditions are
known and whose options are documented."""

import re
from pathlib import Path
from typing import get_args

import pytest

from overlap_sweep.diagnosis import Loss, Pass, Role, advice_by_cause, advice_for
from overlap_sweep.diagnosis.arrivals import arrivals
from overlap_sweep.diagnosis.basis import CONDITIONS, TRAINING, Basis, conditions_of
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.facts import LIBRARIES
from overlap_sweep.diagnosis.losses import views_of
from tests.diagnosis.made_facts import call, rank_facts

DOCUMENTATION = (Path(__file__).parents[2] / "docs/diagnosis.md").read_text()
LONGEST = 200
COLLECTIVES = {"all_gather", "all_to_all"}
"""Those that advice may ask for; and libraries that communicate:"""
COMMUNICATE = {"nccl", "userbuffers", "peer_copy"}
ANY_CAUSE = {*LIBRARIES, *get_args(Role), *get_args(Pass), *CONDITIONS, *COLLECTIVES, *COMMUNICATE}
OWN = [cause.conditions for cause in CAUSES.values()]
ENTRIES = [(cause, entry) for cause, entries in advice_by_cause().items() for entry in entries]
each_cause = pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
_OPTION = re.compile(r"[A-Za-z_][\w.-]*(?:[_.]\w+|[a-z][A-Z])[\w.]*|\b[A-Z]+(?:_[A-Z0-9]+)+\b")
"""Names with an underscore, a point or a capital letter inside."""
_WORDS = {"PyTorch", "DeepSpeed", "FSDP2's", "PyTorch's", "busy_cores"}


@each_cause
def test_it_is_explained(cause):
    assert f"| [`{cause.name}`](#{cause.name}) | {cause.meaning} |" in DOCUMENTATION
    assert f"\n## {cause.name}\n" in DOCUMENTATION


@each_cause
def test_there_is_always_advice_for_it(cause):
    *entries, last = advice_by_cause()[cause.name]
    assert not last.when
    for i, later in enumerate((*entries, last)):
        for earlier in entries[:i]:
            assert not set(earlier.when) <= set(later.when), f"{later.sentence!r} is never given: {earlier.sentence!r}"


def test_advice_is_for_causes_that_exist():
    assert [*advice_by_cause()] == [*CAUSES]


@each_cause
def test_conditions_are_known_and_sentences_short(cause):
    for entry in advice_by_cause()[cause.name]:
        assert {name for name in entry.when if name[0] != "!"} <= ANY_CAUSE.union(cause.conditions)
        assert {name[1:] for name in entry.when if name[0] == "!"} <= ANY_CAUSE.union(*OWN)
        assert set(re.findall(r"\{(\w+)\}", entry.sentence)) <= set(entry.when)
        assert bool(entry.try_) != bool(entry.overlap)
        assert len(entry.sentence) <= LONGEST


def test_options_that_advice_names_are_documented():
    named = {name.strip(".") for _, entry in ENTRIES for name in _OPTION.findall(entry.sentence)}
    assert named >= {"set_modules_to_forward_prefetch", "NCCL_MAX_CTAS", "torch.cuda.synchronize"}
    assert not {name for name in named if name not in DOCUMENTATION and name not in _WORDS}


ONLY_IN_TRAINING = re.compile(r"microbatch|accumulat|DataLoader|[Oo]ptimizer|gradient|checkpoint|loss|batch|tokenizing")
OF_TRAINING = {"none", "queue_order", "contention", "latency", "repeated_reduction"}
"""Causes that need backward passes, or whose advice asks for libraries that only train."""
ONLY_WITH_OTHERS = {"end_of_step", "all_to_all", "between_nodes", "activations_between_nodes"}
"""Conditions that have advice for training and others."""


@pytest.mark.parametrize("cause", sorted(set(CAUSES) - OF_TRAINING))
def test_nothing_that_only_trains_is_advised_where_nothing_trains(cause):
    for name in {"", *ANY_CAUSE, *CAUSES[cause].conditions} - TRAINING - ONLY_WITH_OTHERS:
        if name != "parameters_between_nodes":
            assert not ONLY_IN_TRAINING.search(advice_for(cause, {"no_training": "", name: "7"}).sentence), name


def test_a_change_has_the_value_of_the_sentence() -> None:
    advice = advice_for("issued_late", {"gradient": "", "ddp": "", "smaller": "9"})
    assert "bucket_cap_mb=9)" in advice.sentence
    assert advice.changes == ["ddp.bucket_cap_mb=9"]
    assert advice_for("latency", {"gradient": "", "ddp": ""}).changes == ["ddp.bucket_cap_mb=25"]
    assert advice_for("straggler", {"loads_longer": ""}).changes == ["loader.ready=true"]


@pytest.mark.parametrize("libraries", [{}, {"transformer_engine": ""}], ids=["torch", "transformer_engine"])
def test_copy_engines_are_not_advised_fewer_multiprocessors(libraries: dict[str, str]) -> None:
    advice = advice_for("contention", {"peer_copy": "", **libraries})
    assert advice.sentence.startswith("Copy engines take no SMs")
    assert advice.changes == []


def test_values_in_use_are_not_advised() -> None:
    values = {mib: _values(mib, blocks=8) for mib in (1000.0, 25.0, 24.5, 1.0)}
    assert {mib: one["smaller"] for mib, one in values.items()} == {1000: "25", 25: "12", 24.5: "12", 1: "0.5"}
    assert {mib: one.get("larger") for mib, one in values.items()} == {1000: "4000", 25: "100", 24.5: "98", 1: None}
    blocks = {blocks: _values(1.0, blocks) for blocks in (32, 24, 8, 2)}
    assert {number: (one.get("fewer"), one.get("fewest")) for number, one in blocks.items()} == {
        32: ("16", "8"),
        24: ("12", "6"),
        8: ("4", "2"),
        2: (None, None),
    }


def _values(mib: float, blocks: int) -> dict[str, str]:
    elements = round(mib * 2**20 / 4)
    made = call(0, 1000, sent=elements, received=elements, library="nccl", blocks=blocks)
    facts = rank_facts(0, [made])
    losses = [Loss(1.0, "contention", 1, call=0)]
    views = views_of([facts], [exposure_of(facts)], arrivals([facts]))
    return conditions_of(Basis(views, 0, "contention", "", losses, 1.0, 1))
