"""The optimizer of the user's own training as a Python function, `optimize`, which returns an `Answer`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from overlap_sweep.errors import UserError
from overlap_sweep.program import environment_with_package

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
    levers: Sequence[str] = (),
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
    import msgspec

    from overlap_sweep.optimizer.answer import Answer

    words = shlex.split(command) if isinstance(command, str) else list(command)
    options: dict[str, object] = {"runs": runs, "ranks": ranks, "output": output_dir, "levers": ",".join(levers)}
    given = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    given += ["--minutes", str(minutes), "--allow", allow, "--memory", str(memory), "--format", "json"]
    process = subprocess.run(
        [sys.executable, "-m", "overlap_sweep", "optimize", *given, *overrides, "--", *words],
        env=environment_with_package(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if process.returncode:
        errors = [line for line in (process.stderr or "").splitlines() if line.startswith("error: ")]
        raise UserError(errors[-1].removeprefix("error: ") if errors else "The command was not optimized; see above.")
    return msgspec.json.decode(process.stdout, type=Answer)


def as_template(command: Sequence[str]) -> str:
    """Returns the command as job.command takes it: braces are its own, but for placeholders that are no values, such as
    {run} and {node}."""
    from overlap_sweep.workloads.job.command import OWN

    text = shlex.join(command).replace("{", "{{").replace("}", "}}")
    return re.sub(rf"{{({{(?:{'|'.join(OWN)})}})}}", r"\1", text)
