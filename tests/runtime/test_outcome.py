"""Asserts what is printed while a point runs."""

from __future__ import annotations

import time

import pytest

from overlap_sweep.runtime import outcome
from overlap_sweep.runtime.outcome import told_how_long


def test_a_point_that_takes_long_is_named_again_and_again_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outcome, "SLOW_S", 0.2)
    with told_how_long("tp2_sm4", limit_s=300.0, on_cpu=True):
        time.sleep(0.6)
    assert capsys.readouterr().out.splitlines() == [
        "running tp2_sm4  0.2 s on the CPU so far, 300 s at most",
        "running tp2_sm4  0.4 s on the CPU so far, 300 s at most",
    ]
    monkeypatch.setattr(outcome, "SLOW_S", 30.0)
    with told_how_long("tp2_sm8", limit_s=34.2, on_cpu=False):
        pass
    assert capsys.readouterr().out == ""
