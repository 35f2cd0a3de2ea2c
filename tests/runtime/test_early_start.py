"""A search's workers start while its points are still composed, unless they may not be needed."""

import subprocess
import sys
from pathlib import Path

from tests.sweeps import ROOT, SMALL

_TRACED = """
from overlap_sweep.runtime import group
from overlap_sweep.search import sweeper
def said(owner, name, word):
    call = getattr(owner, name)
    def saying(*arguments):
        returned = call(*arguments)
        print(word, *(agent.keeper.pid for agent in getattr(arguments[0], "_agents", [])), flush=True)
        return returned
    setattr(owner, name, saying)
said(group.WorkerGroup, "start", "started")
said(group.WorkerGroup, "_send", "sent")
said(sweeper, "announce", "checked")
from overlap_sweep.commands.launch import main
main()
"""
SEARCH = ("-m", "hydra/sweeper=bisect", "operator=fc1,qkv", "method=bulk", "num_sm=1", "phase=wgrad", "profile=none")


def traced(directory: Path, *words: str) -> tuple[list[list[str]], subprocess.CompletedProcess[str]]:
    """A search: what began, with the process that keeps the workers."""
    command = [sys.executable, "-c", _TRACED, *SEARCH, *SMALL, "report=false", *words, f"hydra.sweep.dir={directory}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    found = [line.split() for line in done.stdout.splitlines()]
    return [line for line in found if line and line[0] in ("started", "checked", "sent")], done


def test_workers_of_a_new_search_start_before_all_is_composed_and_measure_it(tmp_path: Path) -> None:
    began, done = traced(tmp_path / "new", "tp_size=2", "search.max_points=3")
    assert done.returncode == 0, done.stderr
    assert [word for word, *_ in began][:4] == ["started", "checked", "sent", "sent"]
    (_, keeper), *others = began
    assert {tuple(pids) for word, *pids in others if word == "sent"} == {(keeper,)}
    again, done = traced(tmp_path / "new", "tp_size=2", "search.max_points=3")
    assert done.returncode == 0, done.stderr
    assert again[0][0] == "checked"


def test_workers_of_another_size_make_room(tmp_path: Path) -> None:
    began, done = traced(tmp_path / "new", "tp_size=4,2", "search.max_points=2")
    assert done.returncode == 0, done.stderr
    assert [word for word, *_ in began][:4] == ["started", "checked", "started", "sent"]
    assert not Path(f"/proc/{began[0][1]}").exists()


def test_a_search_that_is_refused_leaves_neither_workers_nor_files(tmp_path: Path) -> None:
    began, done = traced(tmp_path / "new", "tp_size=2,0")
    ((word, keeper),) = began
    assert (word, done.returncode) == ("started", 2)
    assert done.stderr == "error: tp_size=0 is out of range; give a value from 1 to 8.\n"
    assert not Path(f"/proc/{keeper}").exists()
    assert not list(tmp_path.iterdir())
