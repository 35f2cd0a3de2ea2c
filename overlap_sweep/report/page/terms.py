"""Explanations on the page: of columns of tables, and of the words for them in sentences.

Every explanation is on the page once, in its list of terms; headings and words refer to it, and a tooltip shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from overlap_sweep.report.table import Column

WORDS = {
    "none_us": ("without overlap", "no overlap", "none"),
    "floor_us": ("GEMMs alone", "floor"),
    "hidden_fraction": ("hidden",),
    "noise_us": ("noise",),
    "exposed_comm_us": ("exposed",),
    "over_bound": ("the bound",),
    "speedup": ("speedup",),
}
"""Words in sentences for columns, by column."""


@dataclass
class Terms:
    """The explanations that a page refers to."""

    explained: dict[tuple[str, str], str] = field(default_factory=dict)
    """Ids by name and explanation."""

    def id_of(self, column: Column) -> str:
        """Returns the id of the column's explanation; empty if there is none."""
        plain_header = column.header.replace(" ", "_")
        in_files = f"In files: {column.name}." if column.name not in ("", plain_header) else ""
        text = " ".join(filter(None, [column.about, in_files]))
        return self._id(column.header, text) if text else ""

    def _id(self, name: str, text: str) -> str:
        return self.explained.setdefault((name, text), f"term-{len(self.explained) + 1}")

    def marked(self, text: str, columns: Iterable[Column]) -> Markup:
        """Returns the sentence, in which the first word for each column refers to its explanation."""
        known = {word: column for column in columns for word in WORDS.get(column.name, ())}
        if not known:
            return escape(text)
        ordered = sorted(known, key=len, reverse=True)
        words = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, ordered))})(?![\w-])")
        return Markup("").join(self._pieces(text, words, known))

    def _pieces(self, text: str, words: re.Pattern[str], known: dict[str, Column]) -> Iterator[Markup]:
        explained: set[str] = set()
        for i, piece in enumerate(words.split(text)):
            column = known.get(piece) if i % 2 else None
            term = self.id_of(column) if column and column.name not in explained else ""
            if column and term:
                explained.add(column.name)
                yield Markup('<span class="term" tabindex="0" aria-describedby="{}">{}</span>').format(term, piece)
            else:
                yield escape(piece)
