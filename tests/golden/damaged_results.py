"""damaged_results.txt: what in a whole result of a workload, or of every one, is something else, and what is said.

A line is the workload or `every`, places in result.json and what they become (` and ` another), as JSON: `gone` without
what was there, `@PLACE` what is at another place, `* N` so many of them, for `#` each its number, HOSTILE a text of
somebody who wishes the reader ill. `make golden` writes the answers.
"""

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import RESULT_FILE
from tests.golden import command_lines
from tests.make_point import MEASURED, RING, default_timing, implementation, make_point, pass_times, rewrite, variant
from tests.report.hostile_sweeps import PAYLOAD

FILE = Path(__file__).with_suffix(".txt")
WHOLE: dict[str, dict[str, Any]] = {
    "operator": {"bwd": pass_times(90.0, default=default_timing(90.0))},
    "layer": {"variants": {"none": variant([100.0, 101.0]), "default": variant([100.0, 101.0], step_us=1.0)}},
    "kernel": {"implementations": {"ring_exchange": implementation(150.0, setting=RING)}},
}


def write_whole(workload: str, directory: Path) -> Path:
    """Writes a point that has whatever a result may have, and returns its folder."""
    return make_point(workload, directory, name="bad", **WHOLE.get(workload, {}))


def answer(typed: str, folder: Path) -> str:
    """Returns what is said of such results, a line for each different answer; nothing of them may be read."""
    asked, _, damages = typed.partition(" ")
    found = []
    for workload in MEASURED if asked == "every" else [asked]:
        path = write_whole(workload, folder / workload) / RESULT_FILE
        for place, _, value in (one.partition(" = ") for one in damages.split(" and ")):
            rewrite(path.parent, lambda result, to=(place, value): _damage(result, *to))
        reading = read_points(folder / workload)
        (problem,) = reading.problems
        assert not reading.points, typed
        assert problem.startswith(f"{path} ")
        assert problem.isprintable()
        assert len(problem) < 1000
        found.append(problem.removeprefix(f"{path.parent}/"))
    return "".join(f"{line}\n" for line in dict.fromkeys(found))


def _damage(result: dict[str, Any], place: str, value: str) -> None:
    above, _, last = place.rpartition("/")
    inner = _at(result, above)
    key: Any = int(last) if isinstance(inner, list) else json.loads(f'"{last}"')
    if value == "gone":
        del inner[key]
    else:
        inner[key] = _value(re.sub(r"@([\w/]+)", lambda found: json.dumps(_at(result, found[1])), value))


def _at(result: dict[str, Any], place: str) -> Any:
    parts = place.split("/") if place else []
    return functools.reduce(lambda inner, key: inner[int(key) if isinstance(inner, list) else key], parts, result)


def _value(text: str) -> Any:
    text = text.replace("HOSTILE", json.dumps(PAYLOAD)[1:-1])
    if not (repeated := re.fullmatch(r"(.+) \* (\d+)", text)):
        return json.loads(text)
    one, number = json.loads(repeated[1]), int(repeated[2])
    if isinstance(one, dict):
        return {name.replace("#", str(i)): value for name, value in one.items() for i in range(number)}
    return one * number


def write() -> None:
    """Writes the present answers into the file."""

    def answered(typed: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return answer(typed, Path(folder))

    command_lines.write(FILE, answered)
