from __future__ import annotations

import random
import re
from pathlib import Path
from typing import get_args

import pytest

from overlap_sweep.diagnosis import CAUSES
from overlap_sweep.diagnosis.advice import ADVICE, advice_for
from overlap_sweep.diagnosis.facts import LIBRARIES
from overlap_sweep.diagnosis.roles import Role

DOCUMENTATION = Path(__file__).parents[2] / "docs/diagnosis.md"
LONGEST = 200
SIGNS = sorted({sign for advice in ADVICE for sign in advice.needs} | set(LIBRARIES) | set(get_args(Role)))
_OPTION = re.compile(r"[A-Za-z_][\w.-]*(?:[_.]\w+|[a-z][A-Z])[\w.]*|\b[A-Z]+(?:_[A-Z0-9]+)+\b")
"""Names with an underscore, a point or a capital letter inside."""


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_advice_whatever_roles_and_libraries_there_are(cause):
    assert advice_for(cause, ())
    assert advice_for(cause, SIGNS)
    draw = random.Random(cause)
    for _ in range(300):
        assert advice_for(cause, draw.sample(SIGNS, draw.randint(1, 8)))


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


_WORDS = {"PyTorch", "DeepSpeed", "FSDP2's", "PyTorch's"}
