"""Every command: what is wrong is one error and exit status 1 or 2; what is damaged hides nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from overlap_sweep.store import Store
from tests.analyze import analyze, files_below
from tests.golden.made_report import TRACES
from tests.made_sweeps import write_sweep
from tests.make_point import make_point, operator_config
from tests.report.conftest import Made
from tests.report.hostile_sweeps import PAYLOAD
from tests.store.measured import result
from tests.workloads.fsdp.telemetry_logs import write_run

CPU = TRACES / "cpu_gloo_tp2_rank0.json.gz"
DEFAULT = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"
NONE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """A folder with what is wrong, to stand in, beside links to what is not."""
    directory = tmp_path_factory.mktemp("wrong")
    for name in ("operators", "tuned", "traces", "store", "compared", "ranks"):
        (directory / name).symlink_to(made(name))
    for name in ("empty", "results", "reports", "variants"):
        (directory / name).mkdir()
    (directory / "notes.txt").write_text("hello")
    (directory / "cut.json").write_text("")
    (directory / "no.json").write_text('{"schemaVersion": 1}')
    (directory / "mine.json.gz").write_text("mine")
    (directory / "results" / "result.json").touch()
    (directory / "reports" / "points.parquet").write_bytes(b"PAR1")
    for number in range(1, 6):
        point = operator_config(2, "fc1", "all", "bulk", num_sm=number)
        make_point("operator", directory / "five", point, name=f"bulk_sm{number}")
    make_point("fsdp", directory / "bare")
    for name in ("none", "default"):
        shutil.copy(CPU, directory / "variants" / f"trace_{name}_rank0.json.gz")
    return directory


LOGS = "compared/cuda"
ERRORS: dict[str, tuple[str, ...]] = {
    "report empty": ("empty holds no results",),
    "report nowhere": ("nowhere does not exist",),
    "report results": ("results/result.json cannot be read",),
    "report operators --output notes.txt": ("cannot be written to", "--output"),
    "report operators --output new --fail-if layer_ratio>1": ("layer_ratio has no value",),
    "report operators --output unwritten --fail-if speedups<1": ("Unknown column 'speedups'", "speedup"),
    "query empty": ("holds no results",),
    "query reports": ("points.parquet cannot be read", "analyse the results"),
    "query operators num_sms>8": ("Unknown column 'num_sms'. Did you mean num_sm",),
    "query operators --columns slot,speedups": ("Unknown column 'speedups'. Did you mean speedup",),
    "query operators --columns ,": ("name is empty",),
    "query operators --sort -speedups": ("Unknown column 'speedups'",),
    "query operators --fail-if tp_sizes>2": ("Unknown column 'tp_sizes'",),
    "query operators --fail-if tp1_us>1 --fail-if default_us>1": ("default_us has no value",),
    "query operators tp_size==16 --fail-if speedup<1": ("no matching rows",),
    "trace empty": ("empty holds no traces",),
    "trace nowhere.json": ("does not exist",),
    "trace no.json": ("no.json",),
    "trace ranks/alone/trace_rank2.json --by rank": ("traces of two ranks",),
    "trace traces/cpu_gloo_tp2_rank0.json.gz --fail-if exposed>1": ("Unknown column 'exposed'", "exposed_comm_us"),
    "trace traces/cpu_gloo_tp2_rank0.json.gz gone.json --fail-if span_us>0": ("gone.json does not exist",),
    "compare operators nowhere": ("nowhere does not exist",),
    "compare operators empty": ("neither results nor traces",),
    "compare operators notes.txt": ("notes.txt is neither results nor a trace",),
    "compare operators operators": ("both called operators", "give them labels"),
    f"compare operators {DEFAULT}": (f"operators holds results and {DEFAULT} holds traces",),
    f"compare {DEFAULT} cut.json": ("cut.json is empty",),
    f"compare {DEFAULT} {NONE} --fail-if ratio>": ("cannot be understood",),
    f"compare {DEFAULT} {NONE} --by slot": ("--by slot is not for traces",),
    "compare compared/old compared/new --reference c": ("--reference c", "choose one of old, new"),
    "compare compared/old compared/new --by kernel": ("--by kernel is not for results", "point, slot"),
    "compare compared/old compared/new --output notes.txt": ("cannot be written to", "--output"),
    "compare compared/old compared/new --output unwritten --fail-if ratios>1": ("Unknown column 'ratios'",),
    f"compare {LOGS} b={LOGS} --by kernel": ("--by kernel is not for telemetry",),
    f"compare {LOGS} b={LOGS} --candidate hip": ("--candidate hip is not among", "choose one of cuda, b"),
    f"compare {LOGS} b={LOGS} --reference b --candidate b": ("--candidate b is also the reference",),
    f"compare {LOGS} compared/old": (f"{LOGS} holds telemetry", "old holds results", "compare like with like"),
    f"compare {DEFAULT} {LOGS}": ("holds traces and", f"{LOGS} holds telemetry"),
    f"compare {LOGS}/rank_0_metrics.jsonl {LOGS}": ("telemetry of one rank", f"its directory: {LOGS}."),
    f"compare {LOGS} bare": ("copy the rank_<r>_metrics.jsonl files too",),
    "compare a=bare b=bare": ("copy the rank_<r>_metrics.jsonl files of",),
    "timeline nowhere": ("nowhere does not exist",),
    "timeline empty": ("holds no traces",),
    "timeline five": ("has 5 points", "bulk_sm1, bulk_sm2, bulk_sm3 and 2 more."),
    "timeline five/bulk_sm1": ("holds no traces", "profile=all"),
    "timeline variants": ("traces of trace_default, trace_none", "trace_default_rank*"),
    f"timeline {NONE} {DEFAULT}": ("are both of rank 0", "one run"),
    f"timeline {DEFAULT} --iteration 7": ("no iteration 7", "0, 1"),
    f"timeline {DEFAULT} --output empty": ("is a directory",),
    f"timeline {DEFAULT} --output notes.txt/t.json": ("cannot be written",),
    f"timeline {DEFAULT} --output mine.json.gz": ("mine.json.gz exists and is not a timeline", "--force"),
    "history nowhere.sqlite": ("nowhere.sqlite does not exist",),
    "history notes.txt": ("is a file; give another path. If an earlier version wrote it",),
    "history empty": ("is a directory; give the store's name",),
    "history store/measurements.sqlite speed>1": ("Unknown column 'speed'",),
}


WRONG_BY_ITSELF = ("Unknown column", "cannot be understood", "name is empty")
"""Beginnings of errors about expressions and columns, which are wrong whatever was measured."""


@pytest.mark.parametrize("command", ERRORS)
def test_wrong_input_is_one_error_and_nothing_is_written(
    place: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = files_below(place)
    process = analyze(*command.split())
    names_nothing = any(part.startswith(WRONG_BY_ITSELF) for part in ERRORS[command])
    process.assert_error(*ERRORS[command], status=2 if names_nothing else 1)
    new = files_below(place).keys() - before.keys()
    assert {path.relative_to(place).parts[0] for path in new} <= {"new"}
    assert all(before[path] == path.read_bytes() for path in before)
    assert not (place / "unwritten").exists()


USAGE: dict[str, tuple[str, ...]] = {
    "operators analysis.objective=speed": ("choose one of time, overlap_ratio",),
    "operators analysis.speed=1": ("Unknown analysis option analysis.speed=1.",),
    "operators analysis.objectiv=time": ("Did you mean analysis.objective=...?",),
    "qurey operators": ("Unknown command qurey. Did you mean query?",),
    "operators analysis.overlap_threshold=high": ("the value must be a number",),
    "operators analysis.overlap_threshold=7": ("out of range",),
    "query operators --limit 0": (),
    "query operators --format xml": (),
    "query operators --copies --training": ("--training and --copies: give only one",),
    "trace traces --top 3": ("--by class, kernel or stream",),
    "trace traces --by rank --top 3": (),
    "compare operators": (),
    "timeline traces --iteration first": (),
    "": ("Usage: analyze.py",),
}


@pytest.mark.parametrize("command", USAGE)
def test_wrong_usage_has_a_status_of_its_own(place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    analyze(*command.split()).assert_usage_error(*USAGE[command])


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sweeps, telemetry and a store, each with something that cannot be read."""
    directory = tmp_path_factory.mktemp("damaged")
    for name in ("sweep", "whole"):
        write_sweep(directory / name)
    (directory / "sweep" / "cut").mkdir()
    (directory / "sweep" / "cut" / "result.json").write_text("{")
    (directory / "empty").mkdir()
    write_run(directory / "cuda")
    log = write_run(directory / "rocm") / "rank_1_metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[4] = PAYLOAD.encode().replace(b"\n", b" ") + b"\n"
    log.write_bytes(b"".join(lines))
    with Store(directory / "store.sqlite") as kept:
        kept.add(result(4, 100.0, 1), directory)
    (file,) = (directory / "store.sqlite.d").iterdir()
    file.write_bytes(b"{}\n" + file.read_bytes())
    return directory


WARNING = "warning: "
CUT = (WARNING, "cut/result.json cannot be read", "measure that again with resume=")
DAMAGED: dict[str, tuple[tuple[str, ...], str]] = {
    # A directory that cannot be written to.
    "report whole --format csv --output empty/../cuda/rank_0_metrics.jsonl": (("cannot be written to",), "fc1_dgrad"),
    "report sweep --fail-if hidden_fraction<0 --format csv": (CUT, "fc1_dgrad"),
    "query sweep tp_size==2 --format csv": (CUT, "tp2_fc2_fprop_pipeline_sm8_split4"),
    "compare sweep whole": (CUT, "Matching points"),
    f"trace empty {CPU} --format csv": (("empty holds no traces",), str(CPU)),
    f"trace {CPU} gone.json --format csv": (("gone.json does not exist",), str(CPU)),
    "compare cuda rocm": (
        (
            "warning: ",
            "rank_1_metrics.jsonl: line 5 is not a telemetry record",
        ),
        "rocm against cuda",
    ),
    "history store.sqlite": (("byte 0 cannot be read",), "1 measurement"),
}


@pytest.mark.parametrize("command", DAMAGED)
def test_damage_hides_no_answers(damaged: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden case made/damaged has the sentences of whole reports."""
    monkeypatch.chdir(damaged)
    process = analyze(*command.split())
    parts, printed = DAMAGED[command]
    if parts[0] == WARNING:
        (warning,) = [line for line in process.stderr.splitlines() if line.startswith(WARNING)]
        assert process.returncode == 0
        assert all(part in warning for part in parts)
    else:
        process.assert_error(*parts)
    assert printed in process.stdout


FAIL_IF: dict[str, tuple[int, str]] = {
    "report operators --output {out} --fail-if hidden_fraction<0.3 --fail-if speedup<1": (
        *(
            3,
            "hidden_fraction<0.3 holds for 3 of 6 answers; first: llama3_8b tp_size 2 fc1_fprop ",
        ),
    ),
    "report operators --output {out} --fail-if speedup<1": (0, ""),
    "query operators tp_size==4 --limit 1 --fail-if speedup<1": (
        *(
            3,
            "speedup<1 holds for 4 of 4 matching rows; first: llama3_8b llama3_8b_tp4_fc1_bulk_sm4_2 ",
        ),
    ),
    "query operators slot=='fc2_fprop' --fail-if speedup<1": (0, ""),
    "query tuned --layers": (0, ""),
    "trace cpu --format csv --fail-if exposed_comm_us>0.5*span_us": (3, "holds for 4 of 6 rows; first: "),
    "trace cpu --fail-if exposed_comm_us>span_us": (0, ""),
    # Tables show medians of parts, but the rows that are checked are those of the other formats.
    "trace cpu --by kernel --format csv --fail-if num_events>1": (3, "holds for 10 of 52 rows"),
    "trace cpu --by kernel --fail-if num_events>1": (3, "holds for 10 of 52 rows"),
    "trace ranks/ranks --by rank --format csv --fail-if missing.notna()": (3, "missing.notna() holds for "),
    "trace ranks/ranks --by rank --fail-if skew_us>slowest_us": (0, ""),
    "timeline ranks/ranks --output {out}/timeline.json": (0, ""),
    "compare compared/old compared/new --fail-if ratio>1.05": (
        *(3, "holds for 1 of 3 points; first: llama3_8b new tp_size 2 dgrad bulk_sm4 + wgrad bulk_sm4 (ratio 1.25)"),
    ),
    "compare compared/old compared/new --by slot --fail-if ratio>0.2": (3, "ratio"),
    "compare none default --by class --fail-if (change=='slower')and(difference_us>700)": (3, "cublas gemm"),
    "compare none default --fail-if (difference>1200)and(phase=='fwd')": (3, "fwd overlap_us (difference 1272"),
    "compare compared/cuda compared/rocm --fail-if (quantity=='step_ms')and(verdict=='worse')": (3, "step_ms"),
    "compare compared/cuda compared/rocm --reference rocm --fail-if (quantity=='step_ms')and(verdict=='worse')": (
        0,
        "",
    ),
    "history store/measurements.sqlite --fail-if verdict=='slower'": (3, "1 of 6 rows; first: "),
}
TRACES_BY_NAME = {"cpu": CPU, "default": DEFAULT, "none": NONE}


@pytest.mark.parametrize("command", FAIL_IF)
def test_fail_if_has_its_own_status_and_inputs_stay_as_they_are(
    place: Path, made: Made, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, sentence = FAIL_IF[command]
    monkeypatch.chdir(place)
    inputs = made("operators").parent
    before = files_below(inputs)
    process = analyze(*(str(TRACES_BY_NAME.get(word, word)) for word in command.format(out=tmp_path).split()))
    assert (process.returncode, "fail-if" in process.stderr) == (status, status == 3)
    assert sentence in process.stderr
    assert process.stdout
    assert files_below(inputs) == before
