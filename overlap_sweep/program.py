"""How the product was started and installed: the commands to name in messages, the configuration's folder, versions."""

import os
import select
import shlex
import signal
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import overlap_sweep

_PACKAGE = Path(overlap_sweep.__file__).parent

ATTACH = "overlap_sweep.attach"
"""The module that runs a script with the recorder where PYTHONPATH does not reach it."""

LIBRARIES = ("torch", "transformer-engine", "megatron-core", "hydra-core")
"""Libraries whose versions decide what can be measured."""


def launch_program() -> str:
    """Returns the command that measures, as this process was started: `python launch.py` or `overlap-sweep launch`."""
    return "overlap-sweep launch" if _is_installed_command() else "python launch.py"


def launch_command() -> str:
    """Returns this launch as it can be typed again."""
    return shlex.join([*launch_program().split(), *sys.argv[1:]])


def analyze_program() -> str:
    """Returns the command that analyses, as `launch_program`: `python analyze.py` or `overlap-sweep analyze`."""
    return "overlap-sweep analyze" if _is_installed_command() else "python analyze.py"


def _is_installed_command() -> bool:
    started = Path(sys.argv[0])
    return started.name == "overlap-sweep" or started == _PACKAGE / "__main__.py"


def conf_folder() -> Path:
    """Returns the folder of Hydra's configuration: inside an installed package, at the top of a checkout."""
    return _folder("conf")


def docs_folder() -> Path:
    """Returns the folder of the documentation's pages, as `conf_folder`."""
    return _folder("docs")


def _folder(name: str) -> Path:
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def environment_with_package(environ: Mapping[str, str] = os.environ, *, last: bool = False) -> dict[str, str]:
    """Returns the environment, so that a Python started with it imports this very package.

    `last`: after everything else that the environment adds, since other modules lie next to the package in a checkout.
    """
    search_path = [str(_PACKAGE.parent), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(reversed(search_path) if last else search_path)}


def environment_with_recorder(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment, so that every Python started with it begins with our `startup/sitecustomize.py`."""
    startup, search_path = str(_PACKAGE / "startup"), environ.get("PYTHONPATH")
    if search_path and startup in search_path.split(os.pathsep):
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join([startup, *filter(None, [search_path])])}


def print_version() -> None:
    """Prints our version, and on a line each those of the libraries that are installed."""
    print(f"overlap-sweep {overlap_sweep.__version__}")
    for library in LIBRARIES:
        try:
            print(f"{library} {version(library)}")
        except PackageNotFoundError:
            print(f"{library} is not installed")


def stdout_is_closed() -> bool:
    """Returns whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def end_unread() -> None:
    """Ends this process as `git log | head` ends: by SIGPIPE, since nobody reads any more what it prints."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
