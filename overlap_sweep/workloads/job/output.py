"""What a command's output says: why it ended badly, and by `job.metric` the times of its steps."""

import math
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.errors import PointFailed, UserError
from overlap_sweep.workloads.job.config import Job

MOST_BYTES = 2**20
"""Most of a log that is searched."""
LONGEST = 300
"""Longest reason from a log, in characters."""
MOST_LINES = 3
"""Lines of a program's last words."""
_OF_TORCHRUN = re.compile(r"E\d{4} .*torch/distributed/elastic/.*(failed \(exitcode|Received .* death signal)")
_WARNING = re.compile(r"^\[?[WI]\d{4} [\d:.]+ |\b\w*Warning: |^Setting OMP_NUM_THREADS env")
"""Of torchrun and torch, and of Python."""
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last)"
_RAISED = re.compile(r"(?!torch\.distributed\.elastic)[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*")
"""The last line of a traceback. torchrun's own only says that a worker has failed."""
_RAISED_ANOTHER = ("The above exception was", "During handling of the above")
_SAID = re.compile(
    r"\S+: error: .+"
    r"|\S*python\S*: (?:No module named|Error while finding module specification for) .+"
    r"|(?<=: )Signal \d+ \((?!SIGTERM)SIG\w+\) received by PID \d+"
)
"""Lines of argparse and us, of Python about a module, and of torchrun about a signal; SIGTERM is its own."""

AMOUNTS = ("samples_per_step", "tokens_per_step")
"""Options with the work of a step, which a metric's group may name: `samples`, `tokens`."""
_COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_SOURCE = re.compile(r"\s*\[(?:rank|default)(\d+)\]:")
"""What torchrun puts in front of a rank's lines."""
_THOUSANDS = re.compile(r"(?<=\d)(,\d{3})+(?!\d)(\.\d+)?")
_LAST_WORD = re.compile(r"([A-Za-z][\w/.-]*)\W*$")
LONGEST_UNIT = 40
_US = {"seconds": 1e6, "milliseconds": 1e3}
_KINDS = {"rate": "rate", "seconds": "time", "milliseconds": "time"}


def ending(status: int, log: Path, start: int) -> str:
    """Returns how the command ended, and the first error in its log from byte `start` on, or its last words."""
    if error := first_error(_lines(log, start)):
        return f"{_ended(status)}: {error[:LONGEST]}"
    said = last_words(log, start)
    return f"{_ended(status)}; it printed last: {said}" if said else _ended(status)


def last_words(log: Path, start: int) -> str:
    """Returns the last lines that the command itself printed, from byte `start` of its log on: without warnings, and
    without what torchrun says about it. Empty if there are none."""
    said: list[str] = []
    warned = False
    for line in (_PREFIX.sub("", line).rstrip() for line in _lines(log, start)):
        if _OF_TORCHRUN.match(line):
            break
        # Below its message a warning has the line of code.
        warned = bool(_WARNING.search(line)) or (warned and line.startswith("  "))
        # Ranks often say the same.
        if re.search(r"\w", line) and not warned and line not in said[-MOST_LINES:]:
            said.append(line)
    return " / ".join(line.strip() for line in said[-MOST_LINES:])[-LONGEST:]


def _lines(log: Path, start: int) -> list[str]:
    with log.open("rb") as written:
        written.seek(max(start, log.stat().st_size - MOST_BYTES))
        return written.read().decode(errors="replace").splitlines()


def first_error(lines: Sequence[str]) -> str:
    """Returns the error that came first, since those of other ranks follow from it; empty if there is none."""
    lines = [line for line in (_PREFIX.sub("", line).rstrip() for line in lines) if line]
    inside = False
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if _TRACEBACK in line:
            inside = True
        elif inside and _RAISED.match(line):
            inside = False
            if not after.startswith(_RAISED_ANOTHER):
                return line
    return next((found[0] for line in lines if (found := _SAID.search(line))), "")


def _ended(status: int) -> str:
    """Returns an exit status in words: of shells, too, who add 128 to the number of a signal."""
    number = -status if status < 0 else status - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    said = f"ended with exit status {status}{f' ({name})' if name else ''}"
    if status < 0:
        said = f"was killed by {name or f'signal {number}'}"
    return f"{said}, perhaps for lack of memory" if name == "SIGKILL" else said


def check_metric(job: Job) -> None:
    if job.loss is not None:
        _check_pattern("job.loss", job.loss, "loss: ([0-9.]+)")
    if job.metric is None:
        return
    _check_pattern("job.metric", job.metric, "tps: ([0-9.]+)")
    given = [f"job.{name}" for name in _given_amounts(job)]
    if job.metric_is == "rate" and len(given) > 1 and not amount_of(job):
        raise UserError(
            f"job.metric={job.metric} may be a rate of samples or of tokens; name its group (?P<samples>...) or "
            f"(?P<tokens>...), or leave out one of {' and '.join(given)}."
        )


def _check_pattern(option: str, text: str, such_as: str) -> None:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(f"{option}={text} is not a regular expression ({error}); see Python's re.") from None
    if pattern.groups != 1:
        raise UserError(
            f"{option}={text} has {pattern.groups} groups; put brackets around the number only: '{such_as}'."
        )


def amount_of(job: Job) -> str | None:
    """Returns the option with the work per step that a rate counts; None if it is not given."""
    assert job.metric
    given, named = _given_amounts(job), re.compile(job.metric).groupindex
    found = [name for name in AMOUNTS if name.removesuffix("_per_step") in named] or given
    return found[0] if len(found) == 1 and found[0] in given else None


def _given_amounts(job: Job) -> list[str]:
    return [name for name in AMOUNTS if getattr(job, name) is not None]


class _Number(NamedTuple):
    text: str
    after_s: float
    """Moment before which it was not printed, in seconds since 1970."""
    before_s: float


class Output:
    """The numbers in the logs of all nodes, which are being written: some training runs print on the last rank."""

    def __init__(self, job: Job, logs: Mapping[Path, int]) -> None:
        assert job.metric
        self._job, self._offsets = job, dict(logs)
        self._pieces = dict.fromkeys(logs, b"")
        """The beginning of a line that is not written to its end."""
        self._pattern = re.compile(job.metric)
        self._by_source: dict[tuple[int, str], list[_Number]] = {}
        self._read_s = time.time()
        self.disturbed_s: Sequence[tuple[float, float]] = ()
        """When what is printed does not count, nor the first number after it, which is of the time before."""
        self.name = next(iter(self._pattern.groupindex), "")
        """Name of the group, or the word in front of the first number."""

    @property
    def found(self) -> bool:
        return bool(self._by_source)

    @property
    def count(self) -> int:
        """Returns how many times were printed, by every rank that prints them."""
        return min((len(self._counted(own)) for own in self._by_source.values()), default=0)

    def read(self, *, ended: bool = False) -> None:
        """Reads what was written meanwhile; with `ended`, also lines without an end."""
        after_s, written = self._read_s, []
        for path, offset in self._offsets.items():
            with path.open("rb") as log:
                log.seek(offset)
                written.append(log.read())
        self._read_s = time.time()
        for node, (path, text) in enumerate(zip(self._offsets, written, strict=True)):
            self._offsets[path] += len(text)
            # Progress bars write over their line.
            *lines, self._pieces[path] = re.split(rb"[\r\n]", self._pieces[path] + text)
            if ended:
                lines, self._pieces[path] = [*lines, self._pieces[path]], b""
            for line in lines:
                self._find(node, _COLOURS.sub(b"", line).decode(errors="replace"), after_s)

    def _find(self, node: int, line: str, after_s: float) -> None:
        source = _SOURCE.match(line)
        for match in self._pattern.finditer(line):
            number = _Number(_number_in(line, match), after_s, self._read_s)
            self._by_source.setdefault((node, source[1] if source else ""), []).append(number)
            before = _LAST_WORD.search(line[: match.start(1)])
            self.name = self.name or (before[1][-LONGEST_UNIT:] if before else "unit")

    def _counted(self, numbers: Sequence[_Number]) -> list[str]:
        """Returns the numbers of a rank about undisturbed time; each is about the time since the one before."""
        earlier_s = [-math.inf, *(number.after_s for number in numbers)]
        return [
            number.text
            for number, since_s in zip(numbers, earlier_s, strict=False)
            if all(number.before_s < from_s or since_s > until_s for from_s, until_s in self.disturbed_s)
        ]

    def times_us(self) -> list[float]:
        """Returns the times without those to skip, of the slowest rank: per step, or of a rate per unit of work.
        PointFailed if a number cannot be a time or a rate."""
        skip, most = self._job.skip_steps, self._job.steps
        counted = [self._counted(own)[skip : skip + most] for own in self._by_source.values()]
        by_rank = [list(map(self._time_us, own)) for own in counted]
        return list(map(max, zip(*by_rank, strict=False)))

    def _time_us(self, number: str) -> float:
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 1e-9 < value < 1e15:
            raise PointFailed(
                f"job.metric={self._job.metric} found '{number}', which is no {_KINDS[self._job.metric_is]}; put "
                "the parentheses around a positive number",
                final=True,
            )
        return 1e6 / value if self._job.metric_is == "rate" else value * _US[self._job.metric_is]


def _number_in(line: str, match: re.Match[str]) -> str:
    """Returns the number of a match. `([0-9.]+)` ends at a separator of thousands."""
    text = (match[1] or "") + (_THOUSANDS.match(line, match.end(1)) or [""])[0]
    return text.replace(",", "")


def printed_losses(job: Job, logs: Mapping[Path, int]) -> list[str]:
    """Returns the first losses in the logs by `job.loss`, as they were printed, at most one for each skipped step.

    Where logs name ranks, they are those of the rank that printed first. `logs`: with the byte at which the output
    begins. PointFailed if one is no number.
    """
    found: dict[tuple[Path, str], list[str]] = {}
    for path, start in logs.items() if job.loss else ():
        for source, text in _matches(re.compile(job.loss or ""), path, start):
            own = found.setdefault((path, source), [])
            own.append(text)
            if own is next(iter(found.values())) and len(own) >= job.skip_steps:
                return [_loss(job, one) for one in own]
    return [_loss(job, one) for one in next(iter(found.values()), [])]


def _matches(pattern: re.Pattern[str], path: Path, start: int) -> Iterator[tuple[str, str]]:
    """Yields the rank that a log names, if it does, and the number of each match."""
    with path.open("rb") as log:
        log.seek(start)
        # Progress bars write over their line.
        for piece in (piece for line in log for piece in line.split(b"\r")):
            text = _COLOURS.sub(b"", piece).decode(errors="replace")
            source = _SOURCE.match(text)
            for match in pattern.finditer(text):
                yield source[1] if source else "", _number_in(text, match)


def _loss(job: Job, text: str) -> str:
    try:
        float(text)
    except ValueError:
        raise PointFailed(
            f"job.loss={job.loss} found '{text}', which is no number; put the parentheses around one", final=True
        ) from None
    return text
