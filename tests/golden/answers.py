"""What is answered about made-up points, question by question: answers/*.yaml has the points, the golden file what
analyze.py prints of them. Points are of the file's workload, or of operators; points below names are sweeps, of which
the first is the reference of their comparison, and those of history.yaml are in a store."""

from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.console import summary_text
from overlap_sweep.results.run_directory import RESULT_FILE, find_points, read_result
from overlap_sweep.store import Store
from overlap_sweep.workloads import analyse
from tests.analyze import analyze
from tests.listed_points import USUAL, Point, write_points

FILES = sorted(Path(__file__).with_suffix("").glob("*.yaml"))


def write(file: Path, folder: Path) -> None:
    """Writes answers.txt into the folder: each question of the file and what is said."""
    folder.mkdir()
    questions: dict[str, Sequence[Point] | dict[str, Sequence[Point]]] = yaml.safe_load(file.read_text())
    said = []
    for question, points in questions.items():
        with TemporaryDirectory() as place, chdir(place):
            sweeps = points if isinstance(points, dict) else {".": points}
            for name, of_sweep in sweeps.items():
                write_points(file.stem if file.stem in USUAL else "operator", Path(name), of_sweep)
            answer = _kept() if file.stem == "history" else _compared(*sweeps) if len(sweeps) > 1 else _answered()
            said.append(f"## {question}\n{answer}\n")
    (folder / "answers.txt").write_text("\n".join(said))


def _answered() -> str:
    analysis = analyse(Path(), AnalysisConfig())
    return summary_text(analysis) + "".join(f"{problem}\n" for problem in analysis.problems)


def _kept() -> str:
    with Store(Path("store.sqlite")) as store:
        for place in sorted(find_points(Path())):
            store.add(read_result(place / RESULT_FILE), place)
    return analyze("history", "store.sqlite").stdout


def _compared(*names: str) -> str:
    ran = analyze("compare", *names, "--reference", names[0], "--by", "point")
    return ran.stdout + ran.stderr
