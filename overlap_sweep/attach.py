"""Runs a script as Python would, with its training steps recorded: `python -m overlap_sweep.attach train.py --lr 0.1`.

`-m module` instead of the script runs a module. It goes behind torchrun, `accelerate launch` and other launchers as any
module does: `torchrun --nproc-per-node 2 -m overlap_sweep.attach train.py`.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from overlap_sweep.program import RECORD_VARIABLE, environment_with_recorder

_RANK = re.compile(r"--local[-_]rank=\d+")
NEEDED = {"isal": "isal", "msgspec": "msgspec", "omegaconf": "omegaconf", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Modules that recording imports, besides torch: with the packages that have them. They are fewer than the
dependencies of overlap-sweep, which could change what a training itself uses."""
USAGE = "python -m overlap_sweep.attach [-m module | script.py] [arguments]"


def prepared(words: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    """Returns the code of a script or module and the namespace to run it in, with everything else as Python sets it:
    `__main__`, sys.argv and sys.path. SystemExit with status 2 if there is none."""
    words = _with_rank_last(words)
    if words[:1] == ["-m"] and len(words) > 1:
        return _module(words[1], words[2:])
    if not words or words[0].startswith("-"):
        _end(f"there is no script to run; use {USAGE}.")
    return _script(words[0], words[1:])


def _with_rank_last(words: Sequence[str]) -> list[str]:
    """Returns the words with the rank that deepspeed and torch.distributed.launch put in front of a script's arguments
    behind the script, or behind the module."""
    if not words or not _RANK.fullmatch(words[0]):
        return list(words)
    script = 3 if words[1:2] == ["-m"] else 2
    return [*words[1:script], words[0], *words[script:]]


def _script(script: str, arguments: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    path = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118, since Python leaves dots as they are
    if Path(path).is_dir() or Path(path).suffix == ".zip":
        _first_path(path)
        spec = PathFinder.find_spec("__main__", [path])
        code = _code_of(spec)
        if spec is None or code is None:
            _end(f"{script} has no __main__.py; give a script.")
        sys.argv = [script, *arguments]
        return code, _main_module(spec)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        _end(f"{script} cannot be read ({error.strerror}); give a script, or -m and a module.")
    _first_path(os.path.realpath(path).rpartition("/")[0] or "/")
    sys.argv = [script, *arguments]
    main = _main_module(None, path, SourceFileLoader("__main__", path))
    return compile(source, path, "exec", dont_inherit=True), main


def _module(name: str, arguments: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    sys.argv = ["-m", *arguments]
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    code = _code_of(spec)
    if spec is None or code is None:
        _end(f"there is no module {name} to run; give one that python -m runs.")
    sys.argv[0] = spec.origin or name
    return code, _main_module(spec)


def _spec(name: str) -> ModuleSpec | None:
    """Returns where a module is; None if nowhere. What its packages raise is raised."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError:
        return None


def _code_of(spec: ModuleSpec | None) -> CodeType | None:
    loader: Any = spec.loader if spec else None
    code = loader.get_code(spec.name) if spec and hasattr(loader, "get_code") else None
    return code if isinstance(code, CodeType) else None


def _main_module(spec: ModuleSpec | None, path: str | None = None, loader: Any = None) -> dict[str, Any]:
    """Makes a new `__main__`, and returns its namespace."""
    main = ModuleType("__main__")
    main.__spec__ = spec
    main.__loader__ = spec.loader if spec else loader
    main.__package__ = spec.parent if spec else None
    main.__file__ = spec.origin if spec else path
    namespace = main.__dict__
    namespace |= {"__cached__": spec.cached if spec else None, "__builtins__": builtins}
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return namespace


def _first_path(folder: str) -> None:
    """Replaces the working folder, which `python -m` has put first."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _end(reason: str) -> NoReturn:
    """Ends as argparse does, by a line that the launcher finds in the output."""
    say(f"error: {reason}")
    raise SystemExit(2)


def say(sentence: str) -> None:
    """Prints a sentence among the script's output."""
    print(f"overlap_sweep.attach: {sentence}", file=sys.stderr, flush=True)


def record(cannot: Callable[[str], object]) -> None:
    """Records the steps of this process, and of the Pythons that it starts. Calls `cannot` with the reason if this
    Python lacks what that needs."""
    if not os.environ.get(RECORD_VARIABLE):
        say(f"nothing is recorded, since {RECORD_VARIABLE} is not set; launch.py workload=job sets it.")
        return
    from overlap_sweep.errors import UserError

    try:
        from overlap_sweep.workloads.job.recorder import start
        from overlap_sweep.workloads.job.recording import wanted_from
    except ImportError:
        packages = [package for module, package in NEEDED.items() if not _is_importable(module)]
        if not packages:
            raise
        python = shlex.quote(sys.executable)
        cannot(f"this Python lacks what recording needs; run {python} -m pip install {' '.join(packages)}")
        return
    try:
        wanted = wanted_from()
    except UserError as error:
        say(f"nothing is recorded: {error}")
        return
    assert wanted
    _write_whole_lines()
    os.environ.update(environment_with_recorder())
    start(wanted)


def _write_whole_lines() -> None:
    """Has what the script prints written line by line, as to a terminal. launch.py has it unbuffered, since a process
    that is ended loses its buffer; but then each part of a line is written by itself, among those of other ranks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _is_importable(module: str) -> bool:
    """Returns whether a module can be imported, rather than found: one that was compiled for another Python cannot."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    code, namespace = prepared(sys.argv[1:])
    record(_end)
    # Here, so that a traceback has one line of this module.
    exec(code, namespace)
