"""Records the steps of every Python process of a command that imports torch, whoever has started it.

Python imports this module at its start where `environment_with_recorder` has put its folder on PYTHONPATH.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class _BeforeTorch:
    """Finds no module. Python asks it for each that is imported: so only processes that need the recorder load it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torch":
            return
        # A new list, since this one is being gone through.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        if importlib.util.find_spec("overlap_sweep") is None:
            # The package lies in the folder that `python -m` was started in, which is not in the script's path.
            return
        try:
            from overlap_sweep.attach import record, say

            record(say)
        except Exception as error:
            # The command's own import of torch must not fail by us, such as in a Python that is too old for us.
            print(f"overlap_sweep.attach: nothing is recorded: {error!r}", file=sys.stderr, flush=True)


def _give_way() -> None:
    """Imports the sitecustomize that Python would have imported without this one."""
    folder = str(Path(__file__).parent)
    sys.path[:] = [each for each in sys.path if each != folder]
    found = PathFinder.find_spec("sitecustomize")
    if found and found.loader:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)


sys.meta_path.insert(0, _BeforeTorch())
_give_way()
