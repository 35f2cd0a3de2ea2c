"""The tool `docs`: searches and reads the pages of the documentation."""

import re
from typing import Annotated

from pydantic import Field

from overlap_sweep.commands.agents.access import Access
from overlap_sweep.commands.agents.answers import DocsAnswer, Passage
from overlap_sweep.commands.agents.tools import TOP, Limit
from overlap_sweep.errors import UserError, nearest
from overlap_sweep.program import docs_folder

EXCERPT, WHOLE = 600, 8_000
"""Most characters of a section that was found, and of a page that is read."""
IN_HEADING = 5
"""Weight of a word in a heading."""


def docs(
    access: Access,
    words: Annotated[str, Field(description="Words to search for; or the name of a page, to read it.")],
    after: Annotated[int, Field(ge=0, description="Characters of the page to skip.")] = 0,
    limit: Limit = TOP,
) -> DocsAnswer:
    """Search the documentation of this program, or read one of its pages: agents (read it first), diagnosis, predict,
    levers, optimize, columns and others."""
    pages = {path.stem: path.read_text() for path in sorted(docs_folder().glob("*.md"))}
    asked = words.strip().removesuffix(".md")
    if asked in pages:
        text = _whole_sections(pages[asked][after:])
        end = after + len(text)
        more = max(len(pages[asked]) - end, 0)
        read_on = f'docs(words="{asked}", after={end})' if more else ""
        page = Passage(page=asked, heading="", text=text, more_characters=more, read_on=read_on)
        return DocsAnswer(pages=[page], more_pages=0)
    wanted = re.findall(r"[\w.]+", words.lower())
    ranked = sorted(
        (
            (-_score(wanted, heading, body), page, heading, body)
            for page, text in pages.items()
            for heading, body in _sections(text)
        ),
    )
    found = [one for one in ranked if one[0] < 0]
    if not found:
        near = nearest(asked, [*pages])
        hint = f"Did you mean the page {near}?" if near else f"The pages are {', '.join(pages)}."
        raise UserError(f"No page of the documentation has any of these words: {words[:80]}. {hint}")
    return DocsAnswer(
        pages=[
            Passage(
                page=page,
                heading=heading,
                text=text,
                more_characters=len(body) - len(text),
                read_on=f'docs(words="{page}")' if len(text) < len(body) else "",
            )
            for _, page, heading, body in found[:limit]
            for text in [_excerpt(wanted, body)]
        ],
        more_pages=max(len(found) - limit, 0),
    )


def _whole_sections(text: str) -> str:
    """Returns as many sections from the beginning of a text as WHOLE characters hold; of a longer one its lines."""
    if len(text) <= WHOLE:
        return text
    ends = [found.start() for found in re.finditer(r"^##+ ", text[:WHOLE], re.MULTILINE) if found.start()]
    return text[: max(ends, default=text.rfind("\n", 0, WHOLE) + 1)]


def _sections(text: str) -> list[tuple[str, str]]:
    """Returns the headings of a page with the text below each."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return [(heading, body.strip()) for heading, body in zip(parts[1::2], parts[2::2], strict=True)]


def _excerpt(wanted: list[str], body: str) -> str:
    """Returns the lines of a long section that have the words, such as the rows of a table."""
    if len(body) <= EXCERPT:
        return body
    lines = [line for line in body.splitlines() if any(word in line.lower() for word in wanted)]
    return "\n".join(lines or [body])[:EXCERPT]


def _score(wanted: list[str], heading: str, body: str) -> float:
    """Returns how well a section fits: all words count before many of one."""
    head, rest = heading.lower(), body.lower()
    return sum(IN_HEADING * (word in head) + (word in rest) + min(rest.count(word), 10) / 100 for word in wanted)
