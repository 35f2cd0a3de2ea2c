"""Asserts that no sentence on any made sweep claims a gain that its own interval does not exclude."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.report.console import summary_text
from overlap_sweep.report.section import Analysis, Card
from overlap_sweep.results.gain import Gain, gain_of_sum
from tests import made_sweeps
from tests.golden.made_analysis import MADE_UP
from tests.made_sweeps import write_tuned_sweep
from tests.report.page.reports import analysis_of

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
    ("share", "noise", "words"),
    [
        (0.0951, 0.0015, "9.5% faster than no overlap (9.4 to 9.7%)"),
        (0.38, 0.12, "38% faster than no overlap (26 to 48%)"),
        (0.84, 0.17, "84% faster than no overlap (67 to 92%)"),
        (0.38, 0.002, "38.0% faster than no overlap (37.8 to 38.2%)"),
        (0.2, 0.1999, "20.00% faster than no overlap (0.01 to 35.99%)"),
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
