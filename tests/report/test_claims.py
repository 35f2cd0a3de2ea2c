"""Asserts that no sentence on any made sweep claims a gain that its own interval does not exclude."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.report.console import summary_text
from overlap_sweep.report.section import Analysis, Card
from overlap_sweep.results.gain import Gain, gain_of_sum
from overlap_sweep.workloads.operator.choice import gain_together
from tests import made_sweeps
from tests.golden.made_analysis import MADE_UP
from tests.made_sweeps import write_proof, write_tuned_sweep
from tests.make_point import make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of
from tests.results.reading import operators_of

CLAIM = re.compile(r"[\d.]+% (?:faster|slower)(?: per \w+| by [\w/ ]+?)? than")
INTERVAL = re.compile(CLAIM.pattern + r" .+? \((-?[\d.]+) to ([\d.]+)%\)")
OTHER_WORDS = re.compile(r"[\d.]+x (?:as fast|as long|none|no overlap|sequential)|[\d.]+ ?% less time")
"""Ways to state a gain that nothing uses any more."""
EVERY_SWEEP: dict[str, Callable[[Path], Any]] = {
    "tuned": write_tuned_sweep,
    "tuned, noisy": lambda directory: write_tuned_sweep(directory, noise=0.2),
    "every workload": made_sweeps.write_every_workload,
    **{name: write for name, (write, *_) in MADE_UP.items()},
}


def cards(analysis: Analysis) -> list[Card]:
    return [card for section in analysis.sections for answer in section.answers for card in answer.shown_cards]


@pytest.mark.parametrize("name", EVERY_SWEEP)
def test_every_claim_has_an_interval_without_zero(tmp_path: Path, name: str) -> None:
    EVERY_SWEEP[name](tmp_path)
    analysis = analysis_of(tmp_path)
    files = [file.content().decode() for section in analysis.sections for file in section.files]
    on_cards = [text for card in cards(analysis) for text in (card.headline, *card.sentences, *card.basis)]
    for text in (summary_text(analysis), *files, *on_cards):
        # Heads of files are wrapped.
        sentences = re.sub(r"\s*\n#?\s*", " ", text)
        intervals = INTERVAL.findall(sentences)
        assert len(intervals) == len(CLAIM.findall(sentences))
        assert all(0 < float(low) <= float(high) for low, high in intervals), intervals
        assert not OTHER_WORDS.search(sentences)


@pytest.mark.parametrize(
    ("point_us", "spread_us", "wins"), [(300.0, 1.0, True), (390.0, 40.0, False), (300.0, 120.0, False)]
)
def test_flags_and_file_follow_the_headline(tmp_path: Path, point_us: float, spread_us: float, wins: bool) -> None:
    bwd = pass_times(point_us, 400.0, 250.0, spread_us=spread_us)
    config = operator_config(2, "fc1", "all", "bulk", num_sm=4, backend="transformer_engine")
    make_point("operator", tmp_path, config, bwd=bwd)
    (case,) = operators_of(tmp_path).cases
    (card,) = cards(analysis_of(tmp_path))
    assert gain_together(case.passes(2)).faster == wins
    assert case.config(2).switches["tp_comm_overlap"] == wins
    assert bool(case.config(2).slots) == wins
    assert bool(card.use) == wins
    assert ("Leave --tp-comm-overlap out" in " ".join(card.sentences)) != wins


@pytest.mark.parametrize(("noise", "proven"), [(0.0, True), (0.2, False)])
def test_proven_is_only_what_the_rounds_show(tmp_path: Path, noise: float, proven: bool) -> None:
    write_tuned_sweep(tmp_path, noise=noise)
    (case,) = operators_of(tmp_path).cases
    proof = case.proofs[4]
    interval = proof.decisive
    assert proof.proven == proven == (not interval.low <= 1 <= interval.high)
    assert any(sentence.startswith("Proven on") for sentence in cards(analysis_of(tmp_path))[0].sentences) == proven


def test_a_tuned_configuration_that_is_none_does_not_compete_with_it(tmp_path: Path) -> None:
    made_sweeps.write_operators(tmp_path)
    write_proof(tmp_path, {"none": 1.0, "default": 1.2, "floor": 0.85})
    labels = {"none": "none", "default": "default", "tuned": "none"}
    made_sweeps.write_tuner(tmp_path, proofs=[made_sweeps.trial("proof", labels)])
    (case,) = operators_of(tmp_path).cases
    assert (case.proofs[4].nothing_won, case.proofs[4].proven) == (True, False)
    (card,) = cards(analysis_of(tmp_path))
    said = " ".join((card.headline, *card.sentences, *card.basis))
    assert said.count("Nothing beat no overlap") == 1
    assert "uned" not in said


@pytest.mark.parametrize(
    ("share", "noise", "words"),
    [
        (0.0951, 0.0015, "9.5% faster than no overlap (9.4 to 9.7%)"),
        (0.38, 0.12, "38% faster than no overlap (26 to 50%)"),
        (0.38, 0.002, "38.0% faster than no overlap (37.8 to 38.2%)"),
        (0.2, 0.1999, "20.00% faster than no overlap (0.01 to 39.99%)"),
        (-0.2, 0.05, "20% slower than no overlap (15 to 25%)"),
        (0.05, 0.05, "not measurably different from no overlap (noise 5.0%)"),
        (-0.05, 2.5, "not measurably different from no overlap (noise 250%)"),
        (0.05, float("nan"), "not measurably different from no overlap"),
    ],
)
def test_a_gain_in_words(share: float, noise: float, words: str) -> None:
    assert Gain(share, noise).in_words("no overlap") == words


def test_the_gain_of_a_sum_counts_each_part_by_its_time() -> None:
    gain = gain_of_sum([(Gain(0.5, 0.03), 100.0), (Gain(0.0, 0.01), 300.0)])
    assert (gain.share, gain.noise) == pytest.approx((0.125, 3 * 2**0.5 / 400))
