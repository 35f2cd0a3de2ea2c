"""Runs a script as Python would, with its training steps recorded: `python -m overlap_sweep.attach train.py --lr 0.1`.

`-m module` instead of the script runs a module. It is for where PYTHONPATH is ignored or not passed on, as in
containers and by `python -I`; elsewhere every Python of a command begins with the recorder by itself.
"""

import builtins
import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from overlap_sweep.program import environment_with_package, environment_with_recorder
from overlap_sweep.startup.sitecustomize import VARIABLE, Watch

_RANK = re.compile(r"--local[-_]rank=\d+")
USAGE = "python -m overlap_sweep.attach [-m module | script.py] [arguments]"


def words_of(arguments: Sequence[str]) -> list[str]:
    """Returns the script or module and its arguments. SystemExit with status 2 if there is none."""
    words = list(arguments)
    if words and _RANK.fullmatch(words[0]):
        # deepspeed and torch.distributed.launch put it in front of a script's arguments.
        words = [*words[1:], words[0]]
    if not words or (words[0].startswith("-") and (words[0] != "-m" or len(words) == 1)):
        _end(f"there is no script to run; use {USAGE}.")
    return words


def script(words: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    """Returns the code of a script and the namespace to run it in, with everything else as Python sets it:
    `__main__`, sys.argv and sys.path. SystemExit with status 2 if it cannot be read."""
    path = os.path.join(os.getcwd(), words[0])  # noqa: PTH109, PTH118, since Python leaves dots as they are
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        _end(f"{words[0]} cannot be read ({error.strerror}); give a script, or -m and a module.")
    sys.argv = list(words)
    if not sys.flags.safe_path:
        # Instead of the working folder, which `python -m` has put first.
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    namespace = main.__dict__
    namespace |= {"__cached__": None, "__builtins__": builtins}
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    return compile(source, path, "exec", dont_inherit=True), namespace


def _end(reason: str) -> NoReturn:
    """Ends as argparse does, by a line that the launcher finds in the output."""
    print(f"overlap_sweep.attach: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def record() -> None:
    """Records the steps of this process, and of the Pythons that it starts, unless it does so already."""
    if not os.environ.get(VARIABLE):
        unset = f"nothing is recorded, since {VARIABLE} is not set; launch.py workload=job sets it."
        print(f"overlap_sweep.attach: {unset}", file=sys.stderr, flush=True)
        return
    environment = environment_with_recorder()
    if sys.flags.ignore_environment or sys.flags.no_site or environment != os.environ:
        os.environ.update(environment_with_package(environment, last=True))
        sys.meta_path.insert(0, Watch())


if __name__ == "__main__":
    words = words_of(sys.argv[1:])
    if words[0] == "-m":
        record()
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        code, namespace = script(words)
        record()
        # Here, so that a traceback has one line of this module.
        exec(code, namespace)
