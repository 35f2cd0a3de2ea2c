"""Commands that a shell runs: the program's words in the text of `bash -c`, where options of levers are put, and why
other commands of shells cannot be given any.

Pure functions of a command's words and of the texts of the files that these name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from overlap_sweep.levers import programs

_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_TEXT_FOLLOWS = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_TAKES_VALUE = re.compile(r"[-+][A-Za-z]*[oO]|--rcfile|--init-file")
_SPACE = r"(?:[ \t]|\\\n)"
_PLAIN = r"""(?:[^\s'"\\$`;&|<>()]|'[^']*'|"(?:[^"\\$`]|\\.)*"|\\[^\n])"""
"""A part of a word. What a shell would replace, such as `$ARGS`, may stand for any options."""
_PART = re.compile(
    rf"(?P<redirect>(?:\d*(?:>>|>&|<&|>\||>|<)|&>>?){_SPACE}*)?(?P<word>(?!\#){_PLAIN}+)(?:{_SPACE}+|\Z|(?=[<>]|&>))"
)
"""A word, or a redirection with its file."""
_EXPORTS = re.compile(rf"(?:export(?:{_SPACE}+[A-Za-z_]\w*={_PLAIN}*)+{_SPACE}*(?:;|&&|\n)\s*)*")
"""Commands in front that only set variables."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_ITS_PARTS = "its folder as job.directory and its variables in job.env"
_PASSES_WORDS = re.compile(r"\$[@*]|\$\{[@*]")


class _Word(str):
    """A word without its quotes."""

    __slots__ = ("typed",)
    typed: str
    """The word as it stands in the shell's text."""


@dataclass(frozen=True)
class _Simple:
    """A shell's text that is one simple command, perhaps after such as export variables."""

    at: int
    """Place of the text among the words of the whole command."""
    exports: str
    assignments: list[str]
    words: list[_Word]
    redirections: list[str]

    def text(self, words: Iterable[str]) -> str:
        """Returns the text with these words in place of its own, which stay as they were typed."""
        typed = (word.typed if isinstance(word, _Word) else shlex.quote(word) for word in words)
        return self.exports + " ".join([*self.assignments, *typed, *self.redirections])


def program_words(words: Sequence[str]) -> Sequence[str]:
    """Returns the words in which programs are recognised: of `bash -c` with one simple command those of its text."""
    found = _simple(words)
    return found.words if found else words


def all_words(words: Sequence[str]) -> list[str]:
    """Returns the words with those of the text of `bash -c`, if it is one simple command, in place of the text."""
    found = _simple(words)
    return [*words[: found.at], *found.words] if found else [*words]


def changed(words: Sequence[str], changes: Iterable[programs.Change], json_name: str = "") -> list[str]:
    """Returns the words with all changes, as `programs.changed`, in a shell's text if the program is there."""
    found = _simple(words)
    if not found:
        return programs.changed(words, changes, json_name)
    changes = [*changes]
    text = found.text(programs.changed(found.words, changes, json_name)) if changes else words[found.at]
    return [*words[: found.at], text, *words[found.at + 1 :]]


def recognised(words: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Returns the names of the programs that the command starts, and that can be given options. `texts`: those of
    `programs.files_of` the program's words that can be read."""
    command = programs.Command(program_words(words), texts)
    names = [name for name in programs.PROGRAMS if programs.is_recognised(name, command)]
    return [name for name in names if not _hidden(name, words, command)]


def hidden(words: Sequence[str]) -> str:
    """Returns why programs are not recognised in a command that a shell runs; empty if they can be."""
    return _hidden("", words, programs.Command(program_words(words)))


def refusal(
    changes: Mapping[str, programs.Change], words: Sequence[str], texts: Mapping[str, str], *, override: bool
) -> str:
    """Returns which change cannot be made, and why, as `programs.refusal`. `texts`: as of `recognised`."""
    command = programs.Command(program_words(words), texts)
    for name, one in changes.items():
        if reason := _hidden(one.program, words, command):
            return f"{name} cannot be applied: {reason}"
    return programs.refusal(changes, command, override=override)


def _hidden(program: str, words: Sequence[str], command: programs.Command) -> str:
    """Returns why options of a program, or of any without a name, cannot be put into a command that a shell runs; empty
    if they can."""
    if program in ("accelerate", "deepspeed") and programs.is_recognised(program, command):
        # Options in front of the script, and the name of a file, which is replaced wherever it stands.
        return ""
    place = _operand(words)
    if place and place[1] and not _simple(words):
        found = _not_simple(words[place[0]])
        return (
            f"what the shell is given is not one simple command{f' ({found})' if found else ''}; give the command that "
            f"it runs as job.command, {_ITS_PARTS}"
        )
    own = _operand(command.words)
    script = command.words[own[0]] if own else programs.script_of(command.words)
    if not own and not script.endswith(".sh"):
        return ""
    known = programs.PROGRAMS.get(program)
    if not known or not known.script.fullmatch(script) or not programs.is_recognised(program, command):
        return (
            f"{script} is a shell script, in which no program is recognised; give the command that it runs as "
            f"job.command, {_ITS_PARTS}"
        )
    text = command.texts.get(script)
    if text is not None and not _PASSES_WORDS.search(text):
        return f'{script} does not pass its words on, so that no option reaches the program; put "$@" behind its own'
    return ""


def _operand(words: Sequence[str]) -> tuple[int, bool] | None:
    """Returns the place of a shell's first operand, and whether it is the text of `-c`; None without a shell, or if
    that reads its standard input."""
    at = next((i for i, word in enumerate(words) if PurePath(word).name in _SHELLS), None)
    if at is None or programs.script_of(words[:at]):
        return None
    at, is_text = at + 1, False
    while at < len(words) and words[at][:1] in ("-", "+") and len(words[at]) > 1:
        is_text |= bool(_TEXT_FOLLOWS.fullmatch(words[at]))
        at += 2 if _TAKES_VALUE.fullmatch(words[at]) else 1
    return (at, is_text) if at < len(words) else None


def _simple(words: Sequence[str]) -> _Simple | None:
    """Returns the text of a shell's `-c` if it is one simple command."""
    place = _operand(words)
    if not place or not place[1] or _not_simple(words[place[0]]):
        return None
    exports, command = _parted(words[place[0]])
    found = _Simple(place[0], exports, [], [], [])
    for part in _PART.finditer(command):
        typed = part["word"]
        if part["redirect"]:
            found.redirections.append(part["redirect"] + typed)
        elif not found.words and _ASSIGNMENT.match(typed):
            found.assignments.append(typed)
        else:
            word = _Word(shlex.split(typed)[0])
            word.typed = typed
            found.words.append(word)
    return found if found.words else None


def _not_simple(text: str) -> str:
    """Returns the first word of a shell's text that makes it more than a simple command; empty if it is one."""
    rest = _parted(text)[1]
    while rest:
        if not (part := _PART.match(rest)):
            first = rest.split(maxsplit=1)[0]
            return "several lines" if _PART.fullmatch(first) else first
        rest = rest[part.end() :]
    return ""


def _parted(text: str) -> tuple[str, str]:
    """Returns the exports at the beginning of a shell's text, and what follows them."""
    stripped = re.sub(r"\A(?:\s|\\\n)+|(?:\s|\\\n)+\Z", "", text)
    exports = _EXPORTS.match(stripped)
    assert exports
    return stripped[: exports.end()], stripped[exports.end() :]
