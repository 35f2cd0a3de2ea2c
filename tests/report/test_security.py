"""Directories of somebody who wishes the reader ill: they are data, and nothing but data; see docs/security.md."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import os
import pickle
import re
import shutil
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from overlap_sweep.commands.expressions import condition
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.report.console import console_for, print_lines
from overlap_sweep.report.table import csv_cell
from overlap_sweep.results.points import Case
from overlap_sweep.results.run_directory import RESULT_FILE, trace_file
from overlap_sweep.store import Store
from overlap_sweep.tuner import Report
from overlap_sweep.workloads.operator import exports
from tests.analyze import Ran, analyze, files_below, shown
from tests.made_sweeps import write_sweep, write_tuned_sweep
from tests.make_point import make_point, missing_point, operator_config
from tests.report.hostile_sweeps import MARKS, PAYLOAD, TERMINAL, TRACES, hostile_trace, write_hostile_sweep
from tests.report.page.reports import Parsed
from tests.report.page.test_browser import ALL_DRAWN, Visit
from tests.results.reading import operators_of
from tests.store import measured

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BULK = operator_config(2, "fc1", "all", "bulk", num_sm=4)
PACKAGE = Path(__file__).parent.parent.parent / "overlap_sweep"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep, not to be changed; reports about it are in `reports` beside it."""
    place = tmp_path_factory.mktemp("hostile")
    directory = write_hostile_sweep(place / "sweep")
    before = files_below(directory)
    process = analyze(directory, "--output", place / "reports")
    assert process.returncode == 0
    assert_harmless(process.stdout + process.stderr)
    # Results are read and reports written, and nothing else.
    assert files_below(directory) == before
    assert {path.name for path in place.iterdir()} == {"sweep", "reports"}
    return directory


def assert_harmless(text: str) -> None:
    """Nothing that a terminal would obey."""
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"}


def assert_refused(process: Ran, *words: str) -> None:
    """One error that has these words, perhaps among warnings, and status 1."""
    assert_harmless(process.stderr)
    process.assert_error(*words)


def assert_warned(process: Ran, *words: str) -> None:
    """A warning that has these words, beside what could be read."""
    assert_harmless(process.stderr)
    assert process.returncode == 0, process.stderr
    assert any(
        line.startswith("warning: ") and all(word in line for word in words) for line in process.stderr.splitlines()
    )


# The page


def test_no_element_and_no_attribute_is_injected(hostile: Path) -> None:
    found = Parsed((hostile.parent / "reports" / "report.html").read_text())
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"svg", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not [address for address in found.addresses if address.partition(":")[0] in ("javascript", "http", "https")]
    assert {tag for tag in tags if "<" in tag} == set()
    # What must not be an element is there as text, and scripts have it only as JSON.
    assert any(MARKS[0] in text for text in found.text)
    assert not [style for style in found.styles if MARKS[0] in style]
    for script in found.scripts:
        if MARKS[0] in script:
            assert MARKS[0] in json.dumps(json.loads(script), ensure_ascii=False)
            assert not set("<>&\u2028") & set(script)


@pytest.mark.end_to_end
def test_nothing_executes_in_a_browser(hostile: Path, chromium: Browser) -> None:
    visit = Visit(chromium, hostile.parent / "reports" / "report.html")
    page = visit.page
    page.on("dialog", lambda dialog: visit.said.append(dialog.message))
    page.wait_for_selector(ALL_DRAWN, timeout=60_000)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    tooltips, tooltip = 0, page.locator("#vg-tooltip-element")
    marks = page.locator("figure.chart svg .mark-rect path, figure.chart svg .mark-symbol path")
    for number in range(0, marks.count(), max(1, marks.count() // 25)):
        mark = marks.nth(number)
        mark.scroll_into_view_if_needed()
        box = mark.bounding_box()
        if box and box["width"] > 2:
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            # The first one makes the element.
            tooltips += bool(tooltip.count()) and "attacked(" in tooltip.inner_html()
    assert tooltips > 0
    page.locator("#operators-table thead th:visible").nth(3).click()
    page.locator(".dt-search input").first.fill("attacked")
    page.wait_for_timeout(300)
    # A call of attacked(), which the page does not define, would be an error.
    assert visit.said == []
    assert {address.partition(":")[0] for address in visit.asked} <= {"file", "blob", "data"}
    assert visit.count("img, iframe, a[href^=javascript]") == 0
    assert page.evaluate("[...document.querySelectorAll('*')].filter(e => e.onload || e.onerror).length") == 0


# Terminals, files for others


@pytest.mark.parametrize(
    "arguments",
    [
        "query {} --columns all",
        *(f"query {{}} --{kind} --format csv" for kind in ("layers", "kernels", "training", "copies", "tp-training")),
        "query {} --format json",
        "query {} speedup>0 --fail-if model!='x'",
        "compare a={} b={}",
        "trace {} --by kernel",
        "trace {} --by kernel --format csv",
        "trace {} --by stream --format json",
    ],
)
def test_no_command_obeys_what_it_reads(hostile: Path, arguments: str) -> None:
    process = analyze(*(word.replace("{}", str(hostile)) for word in arguments.split()))
    assert_harmless(process.stdout + process.stderr)
    assert "attacked" in process.stdout + process.stderr
    if "json" in arguments:
        assert any(PAYLOAD in str(value) for row in json.loads(process.stdout) for value in row.values())


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_gets_no_control_characters_but_our_own(hostile: Path, columns: int) -> None:
    text = shown(columns, "query", hostile, "--columns", "model,error")
    assert "attacked" in text
    assert_harmless(text)


def test_texts_are_no_markup() -> None:
    stream = io.StringIO()
    console = console_for(stream)
    console.print(f"[red]{TERMINAL}[/red] :fire:")
    print_lines([TERMINAL], console)
    assert_harmless(stream.getvalue())
    assert r"[red]\x1b]52;c;YXR0YWNrZWQ=" in stream.getvalue()
    assert ":fire:" in stream.getvalue()


def test_files_to_train_with_hold_what_was_measured_and_no_more(hostile: Path) -> None:
    reports = hostile.parent / "reports"
    path = reports / "optimal_tp_comm_overlap_cfg_tp4.yaml"
    text = path.read_text()
    assert "attacked" in text
    assert_harmless(text)
    (case,) = operators_of(hostile).cases
    found = overlap_cfg.read(path)
    assert (found.slots, found.switches) == (case.config(4).slots, case.config(4).switches)
    assert json.loads((reports / "ub_cfgs_tp4.json").read_text()) == case.config(4).slots
    module = ast.parse((reports / "megatron_bridge_preset_tp4.py").read_text())
    assert [type(node) for node in module.body] == [ast.ImportFrom, ast.Assign]
    called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    assert all(name.endswith("OverlapCfg") for name in called)


@pytest.mark.parametrize(
    "name",
    [
        "tp_comm_overlap: false",
        "x\n  tp_comm_overlap: false\nfc1_fprop: {method: none}",
        "x\r\x0b\x85\u2028import os; os.abort()",
        "x\x00\x1b\ufeff\\",
        '"""\n__import__("os").abort()\n"""',
    ],
)
def test_names_are_neither_switches_nor_code(tmp_path: Path, name: str) -> None:
    written = overlap_cfg.OverlapConfig({"fc1_dgrad": {"method": "bulk", "num_sm": 4}})
    (tmp_path / "a.yaml").write_text(exports.megatron_yaml(written, [name, f"  {name}"]))
    assert overlap_cfg.read(tmp_path / "a.yaml") == written
    module = ast.parse(exports.megatron_bridge_preset(written, [name], "preset"))
    assert [type(node) for node in module.body] == [ast.ImportFrom, ast.Assign]


def test_cells_are_no_formulas(hostile: Path) -> None:
    for name in ("points.csv", "layers.csv", "kernels.csv"):
        text = (hostile.parent / "reports" / name).read_text()
        assert_harmless(text)
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert any(cell.startswith("'=cmd") for cell in cells)
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]
    assert [csv_cell(value) for value in ("-x", "a=b", -1.5, None)] == ["'-x", "a=b", -1.5, None]
    assert (pd.read_parquet(hostile.parent / "reports" / "points.parquet")["model"] == PAYLOAD).all()


# Places


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", "..", "", "linked.json.gz", "pipe.json.gz"])
def test_a_point_with_a_trace_elsewhere_is_not_read(tmp_path: Path, name: str, no_page: None) -> None:
    sweep = tmp_path / "sweep"
    healthy = make_point("operator", sweep)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "secret.json").write_bytes(hostile_trace())
    (outside / "trace.json.gz").write_bytes(hostile_trace())
    point = make_point("operator", sweep, BULK, traces=[name, trace_file(0)])
    (point / "linked.json.gz").symlink_to(outside / "trace.json.gz")
    os.mkfifo(point / "pipe.json.gz")
    process = analyze(sweep)
    assert_warned(process, point.name)
    assert "Written to" in process.stdout
    assert set(pd.read_csv(sweep / "points.csv")["point"]) == {healthy.name}
    assert_warned(analyze("query", sweep), point.name)


@pytest.mark.parametrize("what", ["the directory", "result.json", ".hydra", "tuner.json", "search.json"])
def test_what_leads_elsewhere_is_refused_alone(tmp_path: Path, what: str, no_page: None) -> None:
    sweep = write_tuned_sweep(tmp_path / "sweep")
    other = make_point("operator", tmp_path / "outside", operator_config(2, "fc2", model="secret_model"))
    missing = missing_point(tmp_path / "outside", operator_config(2, "fc2", model="secret_model"))
    linked = sweep / "linked"
    if what == "the directory":
        linked.symlink_to(other)
    elif what in (".hydra", RESULT_FILE):
        linked.mkdir()
        (linked / what).symlink_to((missing if what == ".hydra" else other) / what)
    else:
        (sweep / what).rename(tmp_path / "outside" / what)
        (sweep / what).symlink_to(tmp_path / "outside" / what)
    process = analyze(sweep)
    assert_warned(process, "is a link that leads out of")
    assert "TP=4" in process.stdout
    written = [path for path in sweep.rglob("*.*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in written if b"secret_model" in path.read_bytes()]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    sweep, outside, precious = (tmp_path / name for name in ("sweep", "outside", "precious"))
    make_point("operator", sweep, {**BULK, "model": {"name": "../../a"}})
    outside.mkdir()
    (sweep / "plots").symlink_to(outside)
    precious.write_text("mine")
    (sweep / "summary.txt").symlink_to(precious)
    before = {path.name for path in tmp_path.iterdir()}
    assert_refused(analyze(sweep, "--plots"), "is a link that leads out of", "--output")
    assert not any(outside.iterdir())
    assert precious.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_names_make_no_paths() -> None:
    for model in ("../../etc", "/", "..", "a" * 5000, "\x00\n", PAYLOAD):
        name = Case(model, "..", "/", None, 1).name
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        assert len(name) < 200
        assert name not in ("", ".", "..")
    assert Case("a" * 5000, "x", "y", None, 1).name != Case("a" * 5001, "x", "y", None, 1).name


def test_a_directory_whose_name_cannot_be_shown(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    make_point("operator", tmp_path, operator_config(2, "fc1"), name="evil\x1b]0;\x07\nname")
    # No UTF-8.
    shutil.copytree(next(tmp_path.glob("*fc1*")), tmp_path / os.fsdecode(b"\xff\xfe"))
    process = analyze(tmp_path)
    assert process.returncode == 0
    assert_harmless(process.stderr)
    assert process.stderr.count("has unprintable characters in its name") == 2
    assert "fc2" in process.stdout


# What would run


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_parquet_brings_no_pickle(tmp_path: Path) -> None:
    attacked = tmp_path / "attacked"
    named, pickled = b"arrow.py_extension_type", pickle.dumps(_Attack(attacked))
    metadata = {b"ARROW:extension:name": named, b"ARROW:extension:metadata": pickled}
    field = pyarrow.field("point", pyarrow.binary(), metadata=metadata)
    parquet.write_table(pyarrow.table([pyarrow.array([b"x"])], pyarrow.schema([field])), tmp_path / "points.parquet")
    assert_harmless(analyze("query", tmp_path).stderr)
    assert not attacked.exists()


def test_nothing_here_loads_what_runs() -> None:
    builtins = {"eval", "exec", "compile", "__import__"}
    forbidden = {"read_pickle", "full_load", "unsafe_load", "load_all", *(f"builtins.{name}" for name in builtins)}
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for part in ("commands", "compare", "diagnosis", "overlap", "report", "results", "study", "trace", "workloads"):
        paths = [*(PACKAGE / part).rglob("*.py")]
        assert paths, part
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                    assert not {name.partition(".")[0] for name in named} & modules, path
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in builtins, path
                    assert not {called, called.rpartition(".")[2]} & forbidden, path
                    assert called not in ("yaml.load", "torch.load", "np.load", "os.system"), path
                    assert "shell" not in {keyword.arg for keyword in node.keywords}, path


def test_columns_named_like_code_are_only_columns() -> None:
    frame = pd.DataFrame({"time_us": [1.0], "__import__('os').abort()": [2.0]})
    assert condition(frame, "`__import__('os').abort()` > 1").mask.tolist() == [True]
    text = pd.DataFrame({"model": ["@x`a`\u2028"]})
    assert condition(text, "model == '@x`a`\\u2028'").mask.tolist() == [True]


@pytest.mark.parametrize("stream", ["²", "9" * 5000, "-1", PAYLOAD])
def test_a_timeline_takes_any_stream(tmp_path: Path, stream: str) -> None:
    trace = json.loads(gzip.decompress((TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()))
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            event["tid"] = stream
    (tmp_path / "trace_rank0.json").write_text(json.dumps(trace))
    process = analyze("timeline", tmp_path / "trace_rank0.json", "--output", tmp_path / "timeline.json")
    assert_harmless(process.stderr)
    assert process.returncode == 0
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_traces_that_lead_elsewhere_are_no_traces(tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    directory.mkdir()
    (tmp_path / "secret.json.gz").write_bytes(hostile_trace())
    (directory / "trace_rank0.json.gz").symlink_to(tmp_path / "secret.json.gz")
    (directory / "trace_rank1.json.gz").write_bytes(hostile_trace())
    process = analyze("trace", directory)
    assert_refused(process, "is a link that leads out of")
    assert ("trace_rank1" in process.stdout, "trace_rank0" in process.stdout) == (True, False)
    assert_refused(analyze("compare", directory, tmp_path / "secret.json.gz"), "is a link that leads out of")
    (directory / "trace_rank1.json.gz").unlink()
    assert analyze("timeline", directory, "--output", tmp_path / "timeline.json").returncode == 1
    assert not (tmp_path / "timeline.json").exists()


def test_a_store_holds_data(tmp_path: Path) -> None:
    with Store(tmp_path / "measurements.sqlite") as kept:
        named = measured.environment(packages={"torch": "2\x1b]0;title\x07"}, host="\x1b[2J")
        kept.add(measured.result(4, 100.0, 1, named), tmp_path)
        wrong = measured.result(4, 90.0, 2)
        wrong.recorded["tp_size"] = "\x1b[2J"
        kept.add(wrong, tmp_path)
    process = analyze("history", tmp_path / "measurements.sqlite")
    assert_refused(process, "it is left out")
    assert_harmless(process.stdout)
    assert "torch 2\\x1b]0;title" in process.stdout


def test_a_saved_report_has_nothing_from_elsewhere(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    directory.mkdir()
    (tmp_path / "secret.json").write_text("secret")
    (directory / "search.json").symlink_to(tmp_path / "secret.json")
    (directory / "summary.txt").write_text("ours")
    (directory / "tuning_report.json").write_text("{}")
    (directory / "optimal_tp_comm_overlap_cfg_tp2.yaml").write_text("fc1_fprop: !!python/name:os.abort\n")
    saved = [path.name for path in Report(directory).save(tmp_path / "saved")]
    assert ("summary.txt" in saved, "search.json" in saved) == (True, False)
    assert not (tmp_path / "saved" / "search.json").exists()
    with pytest.raises(UserError):
        Report(directory).ub_cfgs(2)
