"""Begins every Python process of a command with the recorder of training steps, whoever started it.

Python imports this module at its start where `environment_with_recorder` has put its folder on PYTHONPATH. Most of
these processes are no ranks of a training run: launchers, data loaders, compilers, a shell's helpers. So nothing is
imported here, and the recorder is loaded when an optimizer of torch has stepped for the first time.
"""

import os
import sys

VARIABLE = "OVERLAP_SWEEP_RECORD"
"""Environment variable that asks for a recording."""
LEVERS = '"levers":{"', '"inspect":true'
"""Parts of the variable if levers are to be applied, or inspected."""
RECORDER_FILE = "job_recorder"
"""File in the run directory as soon as a process with the recorder has imported torch: empty, or with the reason why
such a process cannot record."""
NEEDED = {"isal": "isal", "msgspec": "msgspec", "omegaconf": "omegaconf", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Modules that recording imports, besides torch: with the packages that have them. They are fewer than the
dependencies of overlap-sweep, which could change what a training run itself uses."""
_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120, since pathlib takes 5 ms to import


class Watch:
    """Finds no module. Python asks it for each that is imported, so it knows when torch's optimizers are there."""

    def __init__(self) -> None:
        self._record = self._first_step
        self._after = self._step
        self._is_hooked = False
        _write_whole_lines()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        try:
            if name == "torch" and any(part in os.environ.get(VARIABLE, "") for part in LEVERS):
                # Before the script can take anything from torch.
                __import__("overlap_sweep.levers.process")
                sys.modules["overlap_sweep.levers.process"].install()
            is_done = self._is_done()
        except Exception as error:
            give_up(repr(error))
            is_done = True
        if is_done:
            # A new list, since this one is being gone through.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _is_done(self) -> bool:
        """Returns whether torch's optimizers call the recorder, and torch.compile does not compile what they call."""
        optimizer = sys.modules.get("torch.optim.optimizer")
        if not self._is_hooked and hasattr(optimizer, "register_optimizer_step_post_hook"):
            self._is_hooked = True
            _write_to_launcher("")
            optimizer.register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer))  # type: ignore[union-attr]
        # The first optimizer that is made imports it.
        dynamo = sys.modules.get("torch._dynamo")
        if not self._is_hooked or not hasattr(dynamo, "disable"):
            return False
        self._after = dynamo.disable(self._step)  # type: ignore[union-attr]
        return True

    def _step(self, optimizer: object) -> None:
        self._record(optimizer)

    def _first_step(self, optimizer: object) -> None:
        self._record = lambda optimizer: None
        try:
            __import__("overlap_sweep.recorder.step_recorder")
            # None if the program has taken the variable out of its environment.
            if recorder := sys.modules["overlap_sweep.recorder.step_recorder"].of_process():
                self._record = recorder.after_optimizer
                self._record(optimizer)
        except Exception as error:
            give_up((_lacking() if isinstance(error, ImportError) else "") or repr(error))


def say(sentence: str) -> None:
    """Prints a sentence among the command's output, if that is still open: it must not end the program."""
    try:
        print(f"overlap_sweep: {sentence}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def give_up(reason: str) -> None:
    """Says why nothing is recorded, here and to the launcher. The program goes on."""
    say(f"nothing is recorded: {reason}")
    try:
        _write_to_launcher(f"{reason}\n")
    except (OSError, ValueError, LookupError, TypeError):
        # There is no launcher, or no run directory any more.
        return


def _write_to_launcher(text: str) -> None:
    import json

    with open(f"{json.loads(os.environ[VARIABLE])['directory']}/{RECORDER_FILE}", "a") as file:
        file.write(text)


def _lacking() -> str:
    import shlex

    packages = []
    for module, package in NEEDED.items():
        # One that was compiled for another Python is found, but cannot be imported.
        try:
            __import__(module)
        except ImportError:
            packages.append(package)
    python = shlex.quote(sys.executable)
    install = f"this Python lacks what recording needs; run {python} -m pip install {' '.join(packages)}"
    return install if packages else ""


def _write_whole_lines() -> None:
    """Has what the program prints written line by line, as to a terminal. The launcher has it unbuffered, since a
    process that is ended loses its buffer; but then each part of a line is written by itself, among those of other
    ranks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _give_way() -> None:
    """Imports the sitecustomize that Python would have imported without this one."""
    sys.path[:] = [each for each in sys.path if each != _FOLDER]
    own = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, Watch())
    _give_way()
