"""The tool `optimize`: says what would be run, and runs it where the server was allowed to and the call says so."""

import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from overlap_sweep.commands.agents import answers
from overlap_sweep.commands.agents.access import Access
from overlap_sweep.commands.agents.answers import figure
from overlap_sweep.errors import UserError
from overlap_sweep.optimizer.answer import in_lines, read_answer
from overlap_sweep.optimizer.record import OptimizeRecord
from overlap_sweep.program import environment_with_package
from overlap_sweep.report.numbers import visible
from overlap_sweep.results.records import KnobRecord
from overlap_sweep.runtime.own_command import ENDING_S, PROGRAM

LOG = "mcp_optimize.log"


@dataclass
class Started:
    """The optimizations that this server has started, by directory."""

    processes: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def end(self) -> None:
        """Interrupts all that still run, which keeps what they measured, and waits for them."""
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


STARTED = Started()


def optimize(
    access: Access,
    command: Annotated[
        str, Field(description="The whole training command, as in a shell; empty with a directory: read its answer.")
    ] = "",
    run: Annotated[bool, Field(description="Start it; false: only say what would be run.")] = False,
    directory: Annotated[str, Field(description="Directory of the runs: a new one, or that of an earlier call.")] = "",
    minutes: Annotated[float, Field(ge=0.1, description="Most minutes, the proof included.")] = 30.0,
    runs: Annotated[int | None, Field(ge=2, description="Most runs of the command.")] = None,
    allow: Annotated[
        Literal["exact", "rounding", "training"],
        Field(description="Also levers that sum in another order, or that train differently."),
    ] = "exact",
    levers: Annotated[list[str] | None, Field(description="Only these levers or families.")] = None,
    options: Annotated[list[str] | None, Field(description="KEY=VALUE options of launch, as job.steps=10.")] = None,
    wait_s: Annotated[float, Field(ge=0, le=600, description="Seconds to wait for the end.")] = 20.0,
) -> answers.OptimizeAnswer:
    """Find and prove faster settings for a training command. Starts nothing unless run is true and the server may.

    Runs go on after the call returns: call again with the directory alone for the answer so far.
    """
    place = access.path(directory or str(access.roots[0] / f"multirun/{datetime.now():%Y-%m-%d/%H-%M-%S}"))
    if not command:
        if not directory:
            raise UserError("Give the training command, or the directory of an earlier call.")
        return _answer(place, "", wait_s)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"The command cannot be understood ({error}); quote it as for a shell.") from None
    if wrong := [one for one in options or () if "=" not in one or one.startswith("-")]:
        raise UserError(f"{wrong[0]} is no option KEY=VALUE.")
    given = ["--minutes", f"{minutes:g}", "--allow", allow, "--output", str(place)]
    given += [*(["--runs", str(runs)] if runs else []), *(["--levers", ",".join(levers)] if levers else [])]
    arguments = ["optimize", *given, *(options or ()), "--", *words]
    typed = shlex.join(["overlap-sweep", *arguments])
    if not run:
        may = "this server may start it" if access.may_run else "this server may not, since it has no --allow-run"
        said = f"Nothing was started. run=true would start it, for at most {minutes:g} min; {may}."
        return answers.OptimizeAnswer(state="plan", command=typed, directory=str(place), lines=[said])
    if not access.may_run:
        raise UserError("This server may start nothing; whoever configures it can add --allow-run. Or run: " + typed)
    _start(place, arguments)
    return _answer(place, typed, wait_s)


def _start(place: Path, arguments: list[str]) -> None:
    running = STARTED.processes.get(place.resolve())
    if running and running.poll() is None:
        raise UserError(f"An optimization runs in {place}; call with this directory alone for its answer.")
    place.mkdir(parents=True, exist_ok=True)
    with (place / LOG).open("ab") as log:
        STARTED.processes[place.resolve()] = subprocess.Popen(
            [*PROGRAM, *arguments],
            env=environment_with_package(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def _answer(place: Path, typed: str, wait_s: float) -> answers.OptimizeAnswer:
    """Returns what is known so far, after waiting for the end for at most so long."""
    process, until = STARTED.processes.get(place.resolve()), time.monotonic() + wait_s
    while process and process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    state: Literal["running", "ended"] = "running" if process and process.poll() is None else "ended"
    if not (place / OptimizeRecord.FILE).exists():
        if state == "running":
            said = "Nothing is measured yet; call again with the directory."
            return answers.OptimizeAnswer(state=state, command=typed, directory=str(place), lines=[said])
        log = place / LOG
        printed = log.read_text(errors="replace").splitlines() if log.exists() else []
        wrong = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
        nothing = f"{place} has no {OptimizeRecord.FILE}: optimize did not run there; query reads a sweep's points."
        raise UserError(wrong[-1] if wrong else nothing)
    return _read(place, state, typed)


def _read(place: Path, state: Literal["running", "ended"], typed: str) -> answers.OptimizeAnswer:
    found = read_answer(place)
    status: answers.Status = "cannot tell" if found.verdict == "undecided" else "measured"
    return answers.OptimizeAnswer(
        state=state,
        command=typed,
        directory=str(place),
        verdict=found.verdict,
        gain=figure(found.gain, found.low, found.high, status),
        settings=found.settings or found.seemed,
        # Not shortened, since they have the command to run.
        lines=list(map(visible, in_lines(found, place / KnobRecord.FILE))),
    )
