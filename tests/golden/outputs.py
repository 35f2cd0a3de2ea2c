"""Everything that a case's commands print and write, as text that depends on nothing but the code.

python -m tests.golden.outputs [CASE...]    writes the golden files, docs/columns.md, options.md and defaults in conf/
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

from tests.analyze import ROOT, analyze
from tests.golden import (
    analysis_lines,
    command_lines,
    damaged_results,
    declared_pages,
    expressions,
    models,
    overlaps,
    workload_files,
)
from tests.golden.cases import CASES, Case
from tests.golden.page_text import DATA, chart_text, page_text

EXPECTED = Path(__file__).parent / "expected"
BINARY = {".parquet", ".png"}
"""Written beside a table or a chart specification that says the same."""
ENVIRONMENT = {"COLUMNS": "120", "TERMINAL_WIDTH": "120", "HF_HUB_OFFLINE": "1"}

_LONG_NUMBER = re.compile(r"-?\d+\.\d{9,}(?:[eE][-+]?\d+)?")
_ANALYSED = re.compile(r'("analysed": ")[^"]+')


def outputs(case: Case, folder: Path) -> dict[str, str]:
    """Returns texts by name: `commands.txt`, a transcript, and each file that the commands wrote to out/.

    The folder must be empty.
    """
    with chdir(folder), mock.patch.dict(os.environ, ENVIRONMENT), drawing_no_images():
        case.build(folder)
        transcript = "".join(_run(command) for command in case.commands)
    found = {"commands.txt": transcript}
    for path in sorted((folder / "out").rglob("*")):
        if path.suffix == ".html":
            found |= page_text(path.read_text())
        elif path.suffix == ".png" and path.stat().st_size:
            found["charts.txt"] = found.get("charts.txt", "") + chart_text(path.stem, json.loads(path.read_text()))
        elif path.is_file() and path.suffix not in BINARY:
            name = path.relative_to(folder / "out").as_posix()
            # Presets for Megatron-Bridge are Python, but none of ours to lint.
            found[f"{name}.txt" if path.suffix == ".py" else name] = path.read_text()
    if case.files is None:
        # It is in charts.txt.
        found.pop(DATA, None)
    kept = {name for name in found if case.files is None or any(fnmatch(name, held) for held in case.files)}
    return {name: _settled(found[name]) for name in found if name in {"commands.txt", *kept}}


def _run(command: str) -> str:
    ran = analyze(*shlex.split(command))
    printed = ran.stdout + "".join(f"stderr: {line}\n" for line in ran.stderr.splitlines())
    return f"$ python analyze.py {command}\n{printed}exit status {ran.returncode}\n\n"


@contextmanager
def drawing_no_images() -> Iterator[None]:
    """PNGs are drawn from chart specifications, which are compared themselves; it takes most of a report's time.

    The page has those of its charts in it; a comparison's PNGs hold theirs instead.
    """
    with (
        mock.patch("overlap_sweep.report.charts.figures.rendered", return_value=b""),
        mock.patch("overlap_sweep.report.comparison.as_png", lambda chart: json.dumps(chart.spec).encode()),
    ):
        yield


def _settled(text: str) -> str:
    """Without the date of the analysis, digits that differ between processors, and blanks at the ends of lines."""
    text = _ANALYSED.sub(r"\1(date)", text)
    text = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.9g}", text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def expected(case: Case) -> dict[str, str]:
    """Returns the case's golden files by name."""
    folder = EXPECTED / case.name
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def declared() -> dict[Path, str]:
    """Returns the text of each file that is written from declarations, by path."""
    pages = {
        "options": declared_pages.options(),
        "columns": declared_pages.columns(),
        "effects": declared_pages.effects((ROOT / "docs/effects.md").read_text()),
        "diagnosis": declared_pages.diagnosis((ROOT / "docs/diagnosis.md").read_text()),
        "levers": declared_pages.levers_page((ROOT / "docs/levers.md").read_text()),
    }
    schemas = {ROOT / f"docs/schemas/{name}.json": text for name, text in declared_pages.json_schemas().items()}
    return {**{ROOT / f"docs/{name}.md": text for name, text in pages.items()}, **schemas, **workload_files.files()}


def write(case: Case) -> None:
    """Writes the case's golden files anew."""
    with tempfile.TemporaryDirectory() as folder:
        found = outputs(case, Path(folder))
    shutil.rmtree(EXPECTED / case.name, ignore_errors=True)
    for name, text in found.items():
        path = EXPECTED / case.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    for case in CASES:
        if case.name in sys.argv[1:] or not sys.argv[1:]:
            write(case)
    command_lines.write()
    analysis_lines.write()
    damaged_results.write()
    expressions.write()
    models.write()
    overlaps.write()
    for path, text in declared().items():
        path.write_text(text)
