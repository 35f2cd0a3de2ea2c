"""command_lines.txt: wrong command lines of launch.py, and what each is answered.

A new one is its line with `$ `; `make golden` writes the answers.
"""

import re
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.sweeps import launch_here

FILE = Path(__file__).with_suffix(".txt")
_LINE = re.compile(r"^(\$ (?:\w+\.py )?(.*)\n)((?:(?!\$|#|\n).*\n)*)", re.MULTILINE)


def answers(file: Path = FILE) -> dict[str, str]:
    """Returns the answer that the file has, by command line."""
    found = _LINE.findall(file.read_text())
    assert len({typed for _, typed, _ in found}) == len(found)
    return {typed: said for _, typed, said in found}


def answer(typed: str, folder: Path) -> str:
    """Returns what is said of the command line in an empty folder on a machine without GPUs, and how it ends."""
    done = launch_here(*shlex.split(typed), cwd=folder, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    # Progress says how long something took.
    said = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("["))
    return f"{said}exit status {done.returncode}\n"


def _in_empty_folder(typed: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return answer(typed, Path(folder))


def write(file: Path = FILE, answer_to: Callable[[str], str] = _in_empty_folder) -> None:
    """Writes the present answers into the file."""
    file.write_text(_LINE.sub(lambda line: line[1] + answer_to(line[2]), file.read_text()))
