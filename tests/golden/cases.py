"""What is held by golden files: sweeps, recorded or made up, and the commands that are run on them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep.results.run_directory import RESULT_FILE, find_points, read_result
from overlap_sweep.store import Store
from tests.golden import answers, made_analysis, made_report, refusals
from tests.golden.archives import unpack

TRACES = Path(__file__).parent.parent / "data" / "traces"
REPORT = "report sweep --output out"
OF_MADE_UP = ("summary.txt", "page.txt", "chart_data.txt", "*/optimal_tp_comm_overlap_cfg_tp?.yaml")
"""What is held of the report of a made-up sweep: its tables and charts are made as others are."""


@dataclass(frozen=True)
class Case:
    """Commands of analyze.py in a folder in which `build` has made what they read; what they write goes to out/."""

    name: str
    build: Callable[[Path], object]
    commands: tuple[str, ...] = (REPORT,)
    files: tuple[str, ...] | None = None
    """What of the written files is held, as patterns; None is all of it."""


def recorded(name: str, *commands: str) -> Case:
    """The report of a recorded sweep, and further commands."""
    return Case(name, lambda folder: unpack(name, folder / "sweep"), (REPORT, *commands))


def _two_sweeps(folder: Path) -> None:
    unpack("operators", folder / "one_connection")
    unpack("operators_8_connections", folder / "eight_connections")


def _store(folder: Path) -> None:
    """The points of both sweeps of operators in one store."""
    _two_sweeps(folder)
    with Store(folder / "store.sqlite") as store:
        for point in sorted(find_points(folder), key=lambda path: read_result(path / RESULT_FILE).started or ""):
            result = read_result(point / RESULT_FILE)
            if result.status == "ok":
                store.add(result, Path("/results") / point.name)


LAYERS = "none=h200x4_llama3_70b_layer_none.json.gz ring=h200x4_llama3_70b_layer_ring_rs.json.gz"
FSDP2 = "h200x2_fsdp2_checkpoint_rank0.json.gz h200x2_fsdp2_checkpoint_rank1.json.gz"
PRETRAIN = "torchrun pretrain_gpt.py --overlap-grad-reduce"
QUERY = "query sweep --limit 3 --format json"

CASES = (
    recorded(
        "operators",
        "query sweep \"status == 'ok' and phase != 'wgrad'\" --sort slot,-speedup",
        "query sweep --limit 2 --format json",
        'query sweep "hidden_fraction > 0" --columns slot,num_sm,speedup --format csv',
    ),
    recorded(
        "layer",
        "query sweep --layers --columns variant,ratio,hidden_fraction,time_us",
        "query sweep --layers --limit 2 --format json",
    ),
    recorded("kernel", 'query sweep "chosen" --sort kernel,m', QUERY),
    recorded("fsdp", "query sweep", QUERY, "trace sweep --median --by class"),
    recorded("copy_engine", "query sweep", QUERY),
    recorded("tp_training", "query sweep", QUERY, "trace sweep --median --phase all"),
    recorded("job", "query sweep", "query sweep --columns setting,cause,cause_share,cause_try", QUERY),
    recorded("tuner", "query sweep \"operator == 'fc1' and status == 'ok'\" --sort pass,time_us"),
    recorded("knob_search", QUERY),
    Case(
        "comparison",
        _two_sweeps,
        (
            "compare one=one_connection eight=eight_connections --reference one --output out --plots",
            "compare one=one_connection eight=eight_connections --by slot",
            "compare one=one_connection eight=eight_connections --format json",
        ),
    ),
    Case(
        "telemetry",
        lambda folder: unpack("fsdp", folder / "sweep"),
        ("compare ahead=sweep late=sweep --output out --plots", "compare ahead=sweep late=sweep --format csv"),
    ),
    Case("history", _store, ("history store.sqlite", "history store.sqlite \"operator == 'fc1'\" --format json")),
    Case(
        "traces",
        lambda folder: [shutil.copy(path, folder) for path in TRACES.glob("*.json.gz")],
        (
            "trace . --median",
            "trace h200x4_llama3_70b_layer_te_default.json.gz --format json",
            "trace h200x4_llama3_70b_layer_te_default.json.gz --by class",
            "trace h200x4_llama3_70b_layer_te_default.json.gz --by kernel --top 8 --phase bwd",
            "trace h200x4_llama3_70b_layer_ring_rs.json.gz --by stream --format csv",
            "trace . --by rank",
            f"compare {LAYERS} --by class --output out --plots",
            f"compare {LAYERS} --by kernel",
            f"compare {LAYERS} --by stream",
            f"compare {LAYERS} --format json",
        ),
    ),
    Case(
        "diagnose",
        lambda folder: [shutil.copy(path, folder) for path in TRACES.glob("h200x2_*.json.gz")],
        (
            "diagnose .",
            f"diagnose {FSDP2} --format json",
            f"diagnose {FSDP2} --by group",
            f"diagnose {FSDP2} --by group --format csv",
            "diagnose h200x2_cuda_graph_rank0.json.gz h200x2_cuda_graph_rank1.json.gz --by step",
            f"diagnose {FSDP2} --fail-if 'cause != \"none\" and share > 0.02'",
        ),
    ),
    Case(
        "levers",
        lambda folder: [shutil.copy(path, folder) for path in TRACES.glob("h200x2_ddp_*.json.gz")],
        (
            "levers megatron",
            "levers ddp.bucket fsdp2.prefetch torchtitan transformers --for h200x2_ddp_rank0.json.gz",
            "levers ddp.bucket fsdp2.prefetch deepspeed.reduce --for h200x2_ddp_rank0.json.gz --format json",
            f"levers megatron nccl.max_ctas --for '{PRETRAIN} --ddp-bucket-size 10000000'",
            f"levers megatron.ddp_bucket torchtitan.compile fsdp2.prefetch --for '{PRETRAIN}' --format csv",
        ),
    ),
    Case(
        "help",
        lambda folder: None,
        (
            "--help",
            *(
                f"{command} --help"
                for command in (
                    *("report", "query", "trace", "diagnose", "predict", "levers", "compare", "timeline", "history"),
                )
            ),
        ),
    ),
    *(
        Case(f"made/{name}", lambda folder, build=build: build(folder / "sweep"), (REPORT, *commands), OF_MADE_UP)
        for name, (build, *commands) in (made_analysis.MADE_UP | made_report.MADE_UP).items()
    ),
    Case("made/compared", made_report.write_compared, made_report.COMPARISONS),
    Case("made/ranks", made_report.write_ranks, made_report.OF_RANKS),
    Case("refusals", lambda folder: refusals.write(folder / "out"), commands=()),
    *(
        Case(f"answers/{file.stem}", lambda folder, file=file: answers.write(file, folder / "out"), commands=())
        for file in answers.FILES
    ),
)
