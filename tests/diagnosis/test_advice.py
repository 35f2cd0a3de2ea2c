from __future__ import annotations

import random
import re
from pathlib import Path
from typing import get_args

import pytest

from overlap_sweep.diagnosis import CAUSES
from overlap_sweep.diagnosis.advice import ADVICE, advice_for
from overlap_sweep.diagnosis.advice_between_nodes import ACTIVATIONS, NODES, PARAMETERS
from overlap_sweep.diagnosis.basis import TRAINING, Basis, signs_of
from overlap_sweep.diagnosis.causes import Loss
from overlap_sweep.diagnosis.exposure import exposure_of
from overlap_sweep.diagnosis.facts import LIBRARIES
from overlap_sweep.diagnosis.roles import Role
from tests.diagnosis.made_facts import call, rank_facts

DOCUMENTATION = Path(__file__).parents[2] / "docs/diagnosis.md"
LONGEST = 200
SIGNS = sorted(
    {sign for advice in ADVICE for sign in advice.needs if sign[0] != "!"} | set(LIBRARIES) | set(get_args(Role))
)
_OPTION = re.compile(r"[A-Za-z_][\w.-]*(?:[_.]\w+|[a-z][A-Z])[\w.]*|\b[A-Z]+(?:_[A-Z0-9]+)+\b")
"""Names with an underscore, a point or a capital letter inside."""


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_advice_whatever_roles_and_libraries_there_are(cause):
    assert advice_for(cause, {})
    assert advice_for(cause, dict.fromkeys(SIGNS, "7"))
    draw = random.Random(cause)
    for _ in range(300):
        assert advice_for(cause, dict.fromkeys(draw.sample(SIGNS, draw.randint(1, 8)), "7"))


def test_no_advice_is_hidden_behind_one_that_needs_less():
    for i, later in enumerate(ADVICE):
        for earlier in ADVICE[:i]:
            hidden = later.causes & earlier.causes and earlier.needs <= later.needs
            assert not hidden, f"{later.sentence!r} is never given, because of {earlier.sentence!r}"


def test_sentences_are_short_and_name_causes_that_exist():
    for advice in ADVICE:
        assert len(advice.sentence) <= LONGEST, advice.sentence
        assert advice.causes <= set(CAUSES)


def test_options_that_advice_names_are_documented():
    documented = DOCUMENTATION.read_text()
    named = {name.strip(".") for advice in ADVICE for name in _OPTION.findall(advice.sentence)}
    assert named >= {"set_modules_to_forward_prefetch", "NCCL_MAX_CTAS", "torch.cuda.synchronize"}
    missing = {name for name in named if name not in documented and name not in _WORDS}
    assert not missing


ONLY_IN_TRAINING = re.compile(r"microbatch|accumulat|DataLoader|[Oo]ptimizer|gradient|checkpoint|loss|batch|tokenizing")


OF_TRAINING = {"repeated_reduction"}
"""Causes that need backward passes."""


@pytest.mark.parametrize("cause", sorted(set(CAUSES) - {"none", "queue_order", "contention", "latency"} - OF_TRAINING))
def test_nothing_that_only_trains_is_advised_where_nothing_trains(cause):
    for sign in ("", *SIGNS):
        if sign not in (*TRAINING, "end_of_step", "all_to_all", ACTIVATIONS, NODES, PARAMETERS):
            assert not ONLY_IN_TRAINING.search(advice_for(cause, {"untrained": "", sign: ""})), sign


def test_values_in_use_are_not_advised() -> None:
    values = {mib: _values(mib, blocks=8) for mib in (1000.0, 25.0, 24.5, 1.0)}
    assert {mib: one["smaller"] for mib, one in values.items()} == {1000: "25", 25: "12", 24.5: "12", 1: "0.5"}
    assert {mib: one.get("larger") for mib, one in values.items()} == {1000: "4000", 25: "100", 24.5: "98", 1: None}
    assert {blocks: _values(1.0, blocks).get("fewer") for blocks in (32, 24, 8, 2)} == {
        32: "16 or 8",
        24: "12 or 6",
        8: "4 or 2",
        2: None,
    }


def _values(mib: float, blocks: int) -> dict[str, str]:
    elements = round(mib * 2**20 / 4)
    made = call(0, 1000, sent=elements, received=elements, library="nccl", blocks=blocks)
    facts = rank_facts(0, [made])
    loss = Loss("contention", 1, 1.0, 0)
    return signs_of(Basis([facts], [exposure_of(facts)], 0, "contention", "", [loss], 1.0, 1.0, 1))


_WORDS = {"PyTorch", "DeepSpeed", "FSDP2's", "PyTorch's", "busy_cores"}
