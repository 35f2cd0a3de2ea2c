"""How many training processes a command starts, as far as the options of what launches them say it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath

from overlap_sweep.levers import programs, shells


@dataclass(frozen=True)
class _Count:
    """Options by which a launcher is given a number of processes, by their plain names."""

    launchers: tuple[str, ...]
    """Names of the program and its module in a command."""
    processes: tuple[str, ...]
    """On each node if there is an option for these, else on all together."""
    nodes: tuple[str, ...] = ()
    usual_nodes: str = ""
    """Number of nodes if it is not given; empty: unknown."""


_COUNTS = (
    _Count(
        ("torchrun", "torch.distributed.run", "torch.distributed.launch"), ("--nproc-per-node",), ("--nnodes",), "1"
    ),
    _Count(("accelerate", "accelerate-launch", "accelerate.commands.launch"), ("--num-processes",)),
    _Count(("deepspeed",), ("--num-gpus",), ("--num-nodes",), "1"),
    _Count(("mpirun", "mpiexec"), ("-n", "-np", "--n", "--np")),
    _Count(("srun",), ("-n", "--ntasks")),
    _Count(("srun",), ("--ntasks-per-node",), ("-N", "--nodes")),
)
_LAUNCHERS = {launcher for count in _COUNTS for launcher in count.launchers}
_NAME_NODES = {"--hostfile", "-H"}
"""Options of deepspeed with which the number of nodes is unknown unless it is given."""


def started_processes(words: Sequence[str], texts: Mapping[str, str]) -> int | None:
    """Returns the number of training processes that a command starts on all nodes; None if it does not say.

    Of several launchers the one next to the script counts: `srun torchrun` starts what torchrun says. `texts`: as of
    `shells.recognised`.
    """
    if shells.hidden(words):
        found = {each for line in _lines(words) if (each := started_processes(line, texts))}
        return found.pop() if len(found) == 1 else None
    every = shells.all_words(words)
    script = programs.script_of(every)
    names = [PurePath(word).name for word in (every[: every.index(script)] if script else every)]
    at = max((i for i, name in enumerate(names) if name in _LAUNCHERS), default=None)
    if at is None:
        return None
    options = dict(_options(every[at + 1 : len(names)]))
    if names[at].startswith("accelerate"):
        options = programs.options_of("accelerate", programs.Command(every, texts))
    for count in _COUNTS:
        usual = "" if _NAME_NODES & options.keys() else count.usual_nodes
        processes = _number(options, count.processes)
        nodes = _number(options, count.nodes, usual) if count.nodes else 1
        if names[at] in count.launchers and processes and nodes:
            return processes * nodes
    return None


def _lines(words: Sequence[str]) -> Iterator[list[str]]:
    """Yields the words of each line of the script that a shell runs, without such as only a shell understands."""
    if len(words) < 2 or PurePath(words[0]).name not in ("bash", "sh", "zsh"):
        return
    path = Path(words[1])
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in text.replace("\\\n", " ").splitlines():
        with suppress(ValueError):
            found = shlex.split(line, comments=True)
            if found and not shells.hidden(found):
                yield found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the plain name and the value of each option, the first one last: what is launched may have the same."""
    for word, after in reversed([*pairwise([*words, ""])]):
        name, has_value, value = word.partition("=")
        if attached := re.fullmatch(r"(-[A-Za-z])(\d+)", word):
            yield attached[1], attached[2]
        else:
            yield programs.plain(name), value if has_value else after


def _number(options: Mapping[str, str], names: Sequence[str], usual: str = "") -> int | None:
    text = next((options[name] for name in names if name in options), usual)
    # Elastic training is given the fewest and the most nodes.
    fewest, _, most = text.partition(":")
    return int(fewest) if fewest.isdecimal() and most in ("", fewest) else None
