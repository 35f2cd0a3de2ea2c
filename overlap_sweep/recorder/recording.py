"""What the recorder in the user's processes is asked for, and what it writes: the contract with the launcher.

Every rank writes one recording. It is whole or absent, and the rank's trace is there before it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from overlap_sweep.declared import Count, FileName, Gb, Us
from overlap_sweep.errors import UserError
from overlap_sweep.startup.sitecustomize import RECORDER_FILE as RECORDER_FILE
from overlap_sweep.startup.sitecustomize import VARIABLE as RECORD_VARIABLE

LEAST_STEPS = 3
"""Fewest timed steps of a measurement."""
GIVE_UP_STEPS = (5, 10)
"""Numbers of timed steps after which a run that is too slow is given up."""
STEPS_FILE = "job_steps"
"""File with the number of ranks as soon as any rank has ended a step, so that recordings are worth waiting for, and the
number of steps that a rank had ended when it was written."""
PROFILER_STEPS = 3
"""Steps that the profiler needs around those that it records."""
NOT_FINITE: Literal["not finite"] = "not finite"
"""Stands for NaN and infinity, which JSON does not have."""
Number = float | Literal["not finite"] | None


class Wanted(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to record, the same on every rank. RECORD_VARIABLE has it as JSON; the recorder is off without it."""

    directory: str
    """Existing folder of the recordings and traces, absolute."""
    skip_steps: Annotated[int, msgspec.Meta(ge=0)] = 5
    steps: Count = 20
    """Timed steps, after those skipped."""
    profile_steps: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Profiled steps, two steps after those timed, in which the profiler warms up and starts; it stops a step later. 0:
    no trace."""
    optimizer_steps: Count | None = None
    """Calls of optimizers that make up one step; None: recognised from their order."""
    levers: dict[str, str | int | float | bool] = {}
    """Values of levers that the processes apply themselves, by name."""
    levers_override: bool = False
    """Change constructors' arguments that the script gives itself, too."""
    inspect: bool = False
    """Without levers: find out which would change something (`levers.status.inspected`)."""
    give_up_us: Us | None = None
    """Median of the host's times between timed steps above which a run is given up. None: never."""

    def gives_up(self, ends_s: Sequence[float]) -> bool:
        """Returns whether a run is too slow whose timed steps ended at these times, the first of which is where times
        begin."""
        if self.give_up_us is None or len(ends_s) - 1 not in GIVE_UP_STEPS:
            return False
        times_s = sorted(end_s - start_s for start_s, end_s in pairwise(ends_s))
        return times_s[len(times_s) // 2] * 1e6 > self.give_up_us

    @property
    def needed(self) -> int:
        """Returns how many steps a script must have for all of this to be recorded."""
        profiled = PROFILER_STEPS + self.profile_steps if self.profile_steps else 0
        # The first end of a step is where times can begin.
        return max(self.skip_steps, 1) + self.steps + profiled

    def fitting(self, steps: int) -> str:
        """Returns the options with which so many steps of a script are enough; empty if there are none."""
        for profiled in dict.fromkeys((self.profile_steps, min(self.profile_steps, 1))):
            room = steps - (PROFILER_STEPS + profiled if profiled else 0)
            skipped = min(self.skip_steps, room - LEAST_STEPS)
            if skipped > 0:
                fewer = {"skip_steps": skipped, "steps": min(self.steps, room - skipped), "profile_steps": profiled}
                return " ".join(f"job.{name}={one}" for name, one in fewer.items() if one != getattr(self, name))
        return ""

    def as_environment(self) -> dict[str, str]:
        """Returns the variable for the environment of the user's command."""
        return {RECORD_VARIABLE: msgspec.json.encode(self).decode()}


class TrainingState(msgspec.Struct, kw_only=True):
    """What a training has computed at the end of a step; None for what could not be seen."""

    step: Count
    gradients_norm: Number = None
    """Of the gradients of all parameters, if they are still there."""
    gradients_sum: Number = None
    """A norm hardly changes when all that it is of changes a little in random directions; a sum does."""
    signed_sums: list[Number] = []
    """Sums of the gradients with random signs (`training_state`)."""
    layout: str = ""
    """Digest of the sizes that the signs depend on."""
    parameters_norm: Number = None
    parameters_sum: Number = None
    loss: Number = None
    """The loss that overlap_sweep.step(loss) was given."""
    is_short: bool
    """Whether it computes with 16 bits as far as is known: tensors have them, or a GPU may use them."""


class Recording(msgspec.Struct, kw_only=True):
    """The steps of one rank."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    world_size: Count
    host: str
    device: Literal["cuda", "cpu"]
    """`cuda` if the rank used a GPU before its first timed step ended."""
    marked_by: Literal["optimizer", "step"]
    """What marked the ends of steps: calls of optimizers, or of overlap_sweep.step()."""
    calls_per_step: Count
    """Calls that made up one step."""
    host_us: list[Us]
    """Host time between the ends of timed steps; empty if the script ended before the first."""
    gpu_us: list[Us]
    """The same between events on the GPU's current stream; empty on a CPU."""
    collecting_us: list[Annotated[float, msgspec.Meta(ge=0)]] = []
    """Part of `host_us` in which Python collected garbage."""
    peak_memory_gb: Gb | None = None
    """Peak memory of tensors on the GPU until the last timed step, 10^9 bytes; None on a CPU."""
    state: TrainingState | None = None
    """Its own part of the training at the end of the skipped steps."""
    trace: FileName | None = None
    """The rank's trace in the same folder."""
    profiled_s: tuple[float, float] | None = None
    """From when to when the profiler was at work, until the trace was written, in seconds since 1970: what the command
    prints meanwhile says nothing about its steps. None without a profile."""
    environment: dict[str, Any] = {}
    """What only the process knows: versions of torch, CUDA, cuDNN, NCCL; the GPU's name, number and memory."""
    problems: list[str] = []
    """A sentence for each thing that could not be recorded."""
    gave_up: bool = False
    """Whether it ended early, without a trace, because its steps took longer than `give_up_us`."""


def number_of(number: float | str) -> float:
    """Returns a number of a TrainingState; NaN if it is not finite."""
    return math.nan if isinstance(number, str) else number


def recording_file(rank: int | Literal["*"]) -> str:
    return f"job_rank{rank}.json"


def wanted_from(environment: Mapping[str, str] = os.environ) -> Wanted | None:
    """Returns what the environment asks for; None without the variable. UserError if it cannot be understood."""
    text = environment.get(RECORD_VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Wanted)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{RECORD_VARIABLE}={text} cannot be understood ({error}); leave it to launch.py.") from None


def reason_not_to_record(directory: Path) -> str:
    """Returns why a process of the command cannot record; empty if all can, as far as is known."""
    try:
        reasons = (directory / RECORDER_FILE).read_text()
    except FileNotFoundError:
        return ""
    return reasons.partition("\n")[0]


def write_progress(directory: Path, ranks: int, ended: int) -> None:
    """Writes STEPS_FILE, whole or not at all. `ended`: steps of the rank that writes it."""
    path = directory / STEPS_FILE
    # Processes of several nodes may have equal numbers.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    temporary.write_text(f"{ranks} {ended}")
    temporary.replace(path)


def progress(directory: Path) -> tuple[int, int] | None:
    """Returns how many ranks the command has started, and how many steps one of them has ended at least; None before
    one of them has ended a step."""
    try:
        ranks, ended = (directory / STEPS_FILE).read_text().split()
    except FileNotFoundError:
        return None
    return int(ranks), int(ended)


def write_recording(directory: Path, recording: Recording) -> Path:
    """Writes a rank's recording, whole or not at all."""
    # Imported here, for its 0.2 s, which the first step of a rank would wait for.
    from overlap_sweep.results.run_directory import write_json

    return write_json(directory / recording_file(recording.rank), recording)


def read_recordings(directory: Path) -> list[Recording]:
    """Returns the recordings in a folder, by rank. UserError if one cannot be read."""
    found = []
    for path in directory.glob(recording_file("*")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Recording))
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UserError(f"{path} cannot be read ({error}); run the point again.") from None
    return sorted(found, key=lambda recording: recording.rank)
