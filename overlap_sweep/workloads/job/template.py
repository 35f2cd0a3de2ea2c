"""Texts with placeholders, and a command line's words: quoted as for a shell, but split without one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlap_sweep.errors import UserError, nearest

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_OPERATOR = re.compile(r"\|\|?|&&?|;|(\d*[<>]|&>).*|.*\S;", re.DOTALL)
"""A whole word that shells would not pass on."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")
_EXPANDED = re.compile(r"[A-Za-z_({]")
"""What follows a dollar sign that shells would replace."""


@dataclass(frozen=True)
class Filling:
    """What replaces a placeholder."""

    text: str
    """Inside of a word or quotes."""
    words: tuple[str, ...]
    """Outside of quotes."""


@dataclass(frozen=True)
class _Placeholder:
    name: str
    filling: Filling


def filled(template: str, fillings: Mapping[str, Filling], option: str) -> str:
    """Returns the text with its placeholders filled in. UserError for one without a value."""
    return "".join(one if isinstance(one, str) else one.filling.text for one in _parts(template, fillings, option))


def placeholders(template: str) -> set[str]:
    """Returns what stands between the braces of each placeholder."""
    return {found[1] for found in _BRACES.finditer(template) if found[1] is not None}


def _parts(template: str, fillings: Mapping[str, Filling], option: str) -> Iterator[str | _Placeholder]:
    end = 0
    for found in _BRACES.finditer(template):
        yield from template[end : found.start()]
        end, name = found.end(), found[1]
        if name is not None:
            if name not in fillings:
                if template[: found.start()].endswith("$"):
                    instead = f"give bash -c '...', and in there ${{{{{name}}}}}."
                    raise UserError(f"{option} has ${{{name}}}, but is run without a shell; {instead}")
                raise UserError(_unknown(name, fillings, option))
            yield _Placeholder(name, fillings[name])
        elif len(found[0]) == 2:
            yield found[0][0]
        else:
            raise UserError(f"{option} has unbalanced braces; write {{{{ and }}}} for braces.")
    yield from template[end:]


def _unknown(name: str, fillings: Mapping[str, Filling], option: str) -> str:
    plain, colon, _ = name.partition(":")
    if colon and plain in fillings:
        return f"{option} has {{{name}}}, but the only form of a placeholder is {{{plain}:megatron}}."
    if not plain.isidentifier():
        return f"{option} has {{{name}}}, which is not a placeholder; write {{{{ and }}}} for braces."
    near = nearest(plain, [known for known in fillings if ":" not in known])
    instead = f"did you mean {{{near}}}?" if near else f"give +job.values.{plain}=... ."
    return f"{option} has the placeholder {{{name}}} without a value; {instead}"


def split(template: str, fillings: Mapping[str, Filling], option: str) -> list[str]:
    """Returns the words of a command line, filled in. As of shells' variables, the text of a placeholder outside of
    quotes is split at blanks, and inside of quotes stays in its word.

    UserError if there are no words, for open quotes, and for what only a shell would understand.
    """
    words: list[str] = []
    for word, is_plain in _words([*_parts(template, fillings, option)], option):
        if not words and (variable := _ASSIGNMENT.match(word)):
            instead = f"give +job.env.{variable[1]}=... ."
            raise UserError(f"{option} begins with {word}, but is run without a shell; {instead}")
        if is_plain and (_OPERATOR.fullmatch(word) or word.startswith("~/")):
            raise UserError(_no_shell(option, word))
        words.append(word)
    if not words:
        raise UserError(f"{option} is empty; give a command line, such as 'torchrun train.py'.")
    return words


def _words(parts: Sequence[str | _Placeholder], option: str) -> Iterator[tuple[str, bool]]:
    """Yields each word, and whether nothing of it was quoted or filled in."""
    word: str | None = None
    quote, is_plain, i = "", True, 0
    while i < len(parts):
        part, after = parts[i], parts[i + 1] if i + 1 < len(parts) else None
        i += 1
        if isinstance(part, _Placeholder):
            is_plain = False
            texts = [part.filling.text] if quote else [*part.filling.words]
            for text in texts[:-1]:
                yield (word or "") + text, is_plain
                word = None
            word = (word or "") + texts[-1] if texts else word
        elif not quote and part.isspace():
            if word is not None:
                yield word, is_plain
            word, is_plain = None, True
        elif quote != "'" and (part == "`" or (part == "$" and isinstance(after, str) and _EXPANDED.match(after))):
            raise UserError(_no_shell(option, _word_from(parts[i - 1 :])))
        elif part == quote:
            quote = ""
        elif not quote and part in "'\"":
            quote, is_plain, word = part, False, word or ""
        elif part == "\\" and (not quote or (quote == '"' and after in ("\\", '"', "$", "`", "\n"))):
            if after is None:
                raise UserError(f"{option} ends in a backslash; write \\\\ for one.")
            i += isinstance(after, str)
            # A line that goes on in the next one leaves nothing behind.
            if isinstance(after, str) and after != "\n":
                is_plain, word = False, (word or "") + after
        else:
            word = (word or "") + part
    if quote:
        raise UserError(f"{option} has an open quote; close it.")
    if word is not None:
        yield word, is_plain


def _word_from(parts: Sequence[str | _Placeholder]) -> str:
    text = "".join(part if isinstance(part, str) else f"{{{part.name}}}" for part in parts)
    return text.split()[0]


def _no_shell(option: str, word: str) -> str:
    return f"{option} has {word}, but is run without a shell; give bash -c '...', or put it in single quotes."
