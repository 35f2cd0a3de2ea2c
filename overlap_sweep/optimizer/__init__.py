"""The optimizer of the user's own training as a Python function, `optimize`, which returns an `Answer`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from overlap_sweep.runtime import own_command

if TYPE_CHECKING:
    from overlap_sweep.optimizer.answer import Answer

__all__ = ["optimize"]


def optimize(
    command: str | Sequence[str],
    *,
    minutes: float = 30.0,
    runs: int | None = None,
    allow: Literal["exact", "rounding", "training"] = "exact",
    memory: float = 0.95,
    levers: str | Sequence[str] = (),
    ranks: int | None = None,
    output_dir: Path | str | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Answer:
    """Finds faster settings for a training command, without changing its script, and proves them.

    `command` is run as it is, and with levers: `overlap-sweep optimize --help` says what the arguments are. It runs in
    separate processes and writes to `output_dir` (default: multirun/<date>/<time>). Called again with the same
    `output_dir`, also after Ctrl-C, it goes on. `quiet` prints nothing.

    UserError for a wrong argument, and with the command's error if it cannot be measured.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    chosen = levers if isinstance(levers, str) else ",".join(levers)
    options: dict[str, object] = {"runs": runs, "ranks": ranks, "levers": chosen}
    given = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    given += ["--minutes", str(minutes), "--allow", allow, "--memory", str(memory)]
    with own_command.results_in(output_dir) as directory:
        arguments = [*given, "--output", str(directory), *overrides, "--", *words]
        own_command.run([*own_command.PROGRAM, "optimize", *arguments], quiet=quiet)
    # Imported here, because `overlap_sweep` is imported by trainings.
    from overlap_sweep.optimizer.answer import read_answer

    return read_answer(directory)


def as_template(command: Sequence[str]) -> str:
    """Returns the command as job.command takes it: braces are its own, but for placeholders that are no values, such as
    {run} and {node}."""
    from overlap_sweep.workloads.job.command import OWN

    text = shlex.join(command).replace("{", "{{").replace("}", "}}")
    return re.sub(rf"{{({{(?:{'|'.join(OWN)})}})}}", r"\1", text)


def as_typed(template: str) -> str:
    """Returns the command that `as_template` was given."""
    return template.replace("{{", "{").replace("}}", "}")
