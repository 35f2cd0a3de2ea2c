"""command_lines.txt: wrong command lines of launch.py, and what each is answered.

A new one is its line with `$ `; `make golden` writes the answers.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from tests.sweeps import launch_here

FILE = Path(__file__).with_suffix(".txt")
_START = "$ launch.py "


def answers() -> dict[str, str]:
    """Returns the answer that the file has, by command line."""
    found = re.findall(rf"^{re.escape(_START)}(.*)\n((?:(?!\$|#|\n).*\n)*)", FILE.read_text(), re.MULTILINE)
    assert len({typed for typed, _ in found}) == len(found)
    return dict(found)


def answer(typed: str, folder: Path) -> str:
    """Returns what is said of the command line in an empty folder on a machine without GPUs, and how it ends."""
    done = launch_here(*shlex.split(typed), cwd=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    # Progress says how long something took.
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("["))
    return f"{said}exit status {done.returncode}\n"


def write() -> None:
    """Writes the present answers into the file."""
    text = FILE.read_text()
    for typed, before in answers().items():
        with tempfile.TemporaryDirectory() as folder:
            text = text.replace(f"{_START}{typed}\n{before}", f"{_START}{typed}\n{answer(typed, Path(folder))}")
    FILE.write_text(text)
