"""Made-up sweeps of operators and whole layers with what is rare in a report: one sweep has many such things, told
apart by the model's name. Then sweeps of all workloads, and pairs to compare."""

import gzip
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from overlap_sweep.results.run_directory import trace_file
from tests.listed_points import write_sweep_of
from tests.made_sweeps import (
    BEST,
    BEST_SLOTS,
    LABELS,
    OTHER,
    PRESET,
    TUNED,
    WINS,
    trial,
    write_every_workload,
    write_layers,
    write_operators,
    write_proof,
    write_tuned_sweep,
    write_tuner,
)
from tests.make_point import (
    default_timing,
    layer_config,
    make_point,
    missing_point,
    operator_config,
    pass_times,
    resolved,
    variant,
)
from tests.workloads.fsdp.telemetry_logs import SLOW_DEVICE, USUAL_DEVICE, write_run

DATA = Path(__file__).parent.parent / "data"
TRACES = DATA / "traces"
BEST_TRACE = TRACES / "h200x4_llama3_70b_layer_ring_rs.json.gz"
NONE_TRACE = TRACES / "h200x4_llama3_70b_layer_none.json.gz"


MORE_SLOTS = {
    "fc1_dgrad": BEST_SLOTS["fc1_dgrad"],
    "fc2_fprop": {"method": "pipeline", "num_sm": 24, "num_splits": 4},
    "qkv_dgrad": {"method": "bulk", "num_sm": 2},
}
ASYNC_TP = {**WINS, "tuned": 0.97, "preset preset_tp4": 0.99}
WRONG = {"warnings": [f"{TUNED} computes wrong numbers and was not measured: output differs."]}
PROOFS: dict[str, dict[str, Any]] = {
    "wins": {"warnings": ["GPU 3 was throttled."]},
    "tie": {"ratios": {**WINS, "tuned": 0.945}, "noise": 0.0095},
    # Rounds are paired: the machine gets slower by 3 %, six times the difference.
    "drift": {"ratios": {**WINS, "tuned": 0.945}},
    "noisy": {"noise": 0.2},
    "others_tie": {"ratios": {"none": 1.0, "default": 1.0, "tuned": 1.1, "floor": 0.9}},
    "default_is_launch_bound": {"changed": {"default": {"launch_bound": True}}},
    "preset": {"ratios": {**WINS, "preset preset_tp4": 0.89}},
    "preset_in_between": {"ratios": {**WINS, "preset preset_tp4": 0.94}},
    "preset_left_out": {
        "ratios": {label: ratio for label, ratio in WINS.items() if not label.startswith("preset")},
        "warnings": [f"{PRESET} was not measured: too many SMs.", "beware"],
    },
    "none": {"ratios": {"none": 1.0, "default": 1.03, "tuned": 1.02, "floor": 0.9}},
    "none_wins_far": {"ratios": {**WINS, "none": 0.8}},
    "none_ties": {"ratios": {"none": 1.0, "default": 1.03, "tuned": 1.0, "floor": 0.9}, "noise": 0.01},
    "default": {"ratios": {**WINS, "tuned": 0.96}},
    "default_ties": {"ratios": {**WINS, "tuned": 0.95}, "noise": 0.01},
    "no_tuned_nothing_pays": {"ratios": {"none": 1.0, "default": 1.03, "floor": 0.9}},
    "no_tuned_default": {"ratios": {"none": 1.0, "default": 0.98, "floor": 0.9}},
    "beside_none": {"ratios": {"none": 1.0, "tuned": 0.9, "floor": 0.8}},
    "beside_default": {"ratios": {"default": 1.0, "tuned": 0.9, "floor": 0.8}},
    "alone": {"ratios": {"tuned": 1.0, "floor": 0.9}},
    "wrong": {"ratios": {"none": 1.0, "floor": 0.9}, **WRONG},
    "wrong_default": {"ratios": {"none": 1.0, "default": 0.95, "floor": 0.9}, **WRONG},
    "failed": {"ratios": {}, "status": "failed", "error": "[rank3] out of memory\n..."},
    "launch_bound": {"changed": {"tuned": {"launch_bound": True}}},
    # Whose file is not what the operators say one by one, or is for another library.
    "taken_together": {"changed": {"tuned": OTHER}},
    "more_slots": {"changed": {"tuned": {**BEST, "settings": MORE_SLOTS}}},
    "hint": {"backend": "torch"},
    **{
        f"async_tp_{name}": {"backend": "symm_mem", "ratios": {**ASYNC_TP, "default": default}}
        for name, default in {"faster": 0.95, "slower": 1.04, "as_fast": 1.0}.items()
    },
}
"""By model what `write_proof` takes, and the backend unless it is megatron."""


def write_proofs(directory: Path) -> None:
    """A model for each verdict about a tuned configuration; without a verdict; and one sweep more than once."""
    for model, proof in PROOFS.items():
        backend, told = proof.get("backend", "megatron"), {k: v for k, v in proof.items() if k != "backend"}
        if model == "preset_left_out":
            # One by one nothing is known of its operators.
            make_point("operator", directory / model, operator_config(4, backend=backend, model=model))
        else:
            write_operators(directory / model, model=model, backend=backend)
        write_proof(directory / model, point=layer_config(model=model, backend=backend), **told)
        labels = {**LABELS, "tuned": "none"} if model.startswith("no_tuned") else LABELS
        write_tuner(directory / model, proofs=[trial("proof", labels)])
    dropped = {"dropped TP=4 qkv": "late", "dropped TP=4 fc1": "late", "dropped TP=4 fc2": "x"}
    for model, record in {
        "no_layer": {},
        "dropped": {"dropped": dropped},
        "given_up": {"proofs": [trial("nowhere", LABELS)]},
    }.items():
        make_point("operator", directory / model, operator_config(4, backend="megatron", model=model))
        write_tuner(directory / model, **record)
    write_operators(directory / "async_tp_alone", model="async_tp_alone", backend="symm_mem")
    for model, bwd in {
        "not_timed": pass_times(90.0),
        "better_as_a_whole": pass_times(390.0, 400.0, 300.0, default=default_timing(350.0, 400.0)),
        "worse_than_none": pass_times(390.0, 400.0, 300.0, default=default_timing(450.0, 400.0)),
    }.items():
        point = operator_config(2, "fc1", "all", "bulk", model=model, backend="symm_mem")
        make_point("operator", directory / model, point, bwd=bwd)
    write_proof(directory / "stray", point=layer_config(model="stray"))
    write_tuner(directory / "stray", proofs=[trial("proof", LABELS)])
    failed = layer_config(model="together")
    write_operators(directory / "together", model="together")
    write_proof(directory / "together", point=failed)
    make_point("layer", directory / "together", failed, name="together", status="failed", error="boom")
    together = [trial("together", {"best of each slot": "file:a"})]
    write_tuner(directory / "together", together=together, proofs=[trial("proof", LABELS)])
    # The same case twice, and once more without the tuner's record.
    write_tuned_sweep(directory / "10-00", started="2026-11-20T10:00:00+00:00")
    write_tuned_sweep(directory / "11-00", ratios={**WINS, "tuned": 0.9}, started="2026-11-20T11:00:00+00:00")
    write_tuned_sweep(directory / "12-00")
    (directory / "12-00" / "tuner.json").unlink()
    search = directory / "12-00" / "search.json"
    search.write_text(search.read_text().replace('"dropped": {}', '"dropped": {"fc2": "no time"}'))


def write_rare_layers(directory: Path) -> None:
    write_sweep_of("rare_layers", write_layers(directory))


def write_damaged(directory: Path) -> None:
    """Whatever cannot be read is named after the answers."""
    write_tuned_sweep(directory)
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    cut = make_point("operator", directory, bulk, name="cut") / "result.json"
    cut.write_text('{"schema": 1, "na')
    (make_point("operator", directory, bulk, traces=["t.json"], name="empty_trace") / "t.json").write_text("")
    missing_point(directory, bulk)
    (directory / "tuner.json").write_text("{")


def write_traced(directory: Path) -> None:
    """Timelines: no overlap above the best, the best alone, what was not chosen, a trace that is broken."""
    best = {"trace_rank0.json.gz": BEST_TRACE}
    for model, bwd_us, traces in (
        ("both", 80.0, {**best, "trace_none_rank0.json.gz": NONE_TRACE}),
        ("beside_another_point", 80.0, best),
        ("best_alone", 80.0, best),
        ("not_chosen", 120.0, best),
        ("broken", 80.0, {**best, "trace_none_rank0.json.gz": None}),
        ("untraced", 80.0, {}),
    ):
        point = operator_config(2, "fc1", "all", "bulk", num_sm=4, model=model)
        written = make_point("operator", directory, point, bwd=pass_times(bwd_us), traces=list(traces), name=model)
        for name, path in traces.items():
            shutil.copy(path, written / name) if path else (written / name).write_bytes(b"\x1f\x8bbroken")
    of_layer = {trace_file(0, "none"): NONE_TRACE, trace_file(0, TUNED): BEST_TRACE}
    write_operators(directory / "tuner")
    proof = write_proof(directory / "tuner", traces=list(of_layer))
    for name, path in of_layer.items():
        shutil.copy(path, proof / name)
    write_tuner(directory / "tuner", proofs=[trial("proof", LABELS)])
    # The trace of a point without overlap will do, too.
    point = operator_config(2, "fc1", model="beside_another_point")
    written = make_point("operator", directory, point, traces=["trace_rank0.json.gz"], name="no_overlap")
    shutil.copy(NONE_TRACE, written / "trace_rank0.json.gz")


def write_compared(folder: Path) -> None:
    """Pairs to compare: operators, many of them, layers, copies, and training runs with dips."""

    def bulk(directory: Path, **times_us: float) -> None:
        for name, time_us in times_us.items():
            point = operator_config(2, "fc1", "all", "bulk", num_sm=int(name.removeprefix("sm")))
            make_point("operator", directory, point, bwd=pass_times(time_us, 400.0, 300.0))

    def run(directory: Path, name: str, factor: float, changes: dict[str, Any]) -> None:
        point = resolved("fsdp", **{"distributed.dp_size": 2, **changes})
        written = make_point("fsdp", directory, point, name=name, step_us=1500.0 * factor, spread_us=5.0)
        write_run(written, factor=factor)

    bulk(folder / "old", sm4=320.0, sm8=360.0)
    bulk(folder / "new", sm4=400.0, sm8=310.0, sm16=330.0)
    many = {f"sm{number}": 300.0 + number for number in range(1, 25)}
    bulk(folder / "many" / "old", **many)
    bulk(folder / "many" / "new", **{name: time_us * (2 if name == "sm7" else 1) for name, time_us in many.items()})
    for name, file_us, copy_us in (("old", 57.0, 400.0), ("new", 51.3, 200.0)):
        variants = {"none": variant([60.0] * 6), f"file:/{name}/best.yaml": variant([file_us] * 6)}
        make_point("layer", folder / "layers" / name, variants=variants)
        make_point("copy_engine", folder / "copies" / name, copy_us=copy_us)
    slow = {"compute_ms": 96.0, "hidden_ms": 17.0, "exposed_ms": 24.0, "device": SLOW_DEVICE}
    exposed = {"hidden_ms": 10.0, "exposed_ms": 30.0}
    write_run(folder / "cuda", profiled=2)
    write_run(folder / "rocm", factor=1.1, dips={(17, 1): slow, (25, 0): exposed})
    for name, dip in {
        "both_ranks": {(9, 0): exposed, (9, 1): {**exposed, "exposed_ms": 31.0}},
        "capped": {(9, 0): {**exposed, "device": {**USUAL_DEVICE, "sm_clock_mhz": 1965.0, "throttle_reasons": 4.0}}},
        "blind": {(9, 0): {**exposed, "device": {}}},
    }.items():
        write_run(folder / "dips" / name, dips=dip)
    for batch_size, factor in ((64, 1.0), (32, 0.8)):
        run(folder / "work", f"m_training.batch_size={batch_size}", factor, {"training.batch_size": batch_size})
    for side, factor in (("a", 1.0), ("b", 0.8)):
        for i in range(4):
            changes = {"fsdp.forward_prefetch": i, "distributed.enable_overlap": side == "b"}
            run(folder / "runs" / side, f"fsdp_{i}", factor, changes)
    write_run(folder / "runs" / "b" / "fsdp_more")
    shutil.copytree(DATA / "h200x2_fsdp", folder / "h200x2_fsdp")


def write_rank(directory: Path, rank: int, slower: float = 1.0) -> Path:
    """A recorded trace on CPUs, as if of another rank of four, its times stretched."""
    content = json.loads(gzip.decompress((TRACES / "cpu_gloo_tp2_rank0.json.gz").read_bytes()))
    content["distributedInfo"] |= {"rank": rank, "world_size": 4}
    for event in content["traceEvents"]:
        for name in event.keys() & {"ts", "dur"}:
            event[name] = float(event[name]) * slower
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"trace_rank{rank}.json"
    path.write_text(json.dumps(content))
    return path


def write_ranks(folder: Path) -> None:
    """Traces of three of four ranks, of one alone, and one that was cut short."""
    for rank, slower in ((0, 1.0), (1, 2.0), (3, 1.5)):
        write_rank(folder / "ranks", rank, slower)
    whole = write_rank(folder / "alone", 2).read_bytes()
    (folder / "cut.json").write_bytes(whole[: len(whole) * 3 // 4])


MADE_UP: dict[str, tuple[Any, ...]] = {
    "rare_operators": (partial(write_sweep_of, "rare_operators"), "query sweep --columns all"),
    "rare_proofs": (write_proofs,),
    "rare_layers": (write_rare_layers, "query sweep --layers"),
    "every_workload": (
        write_every_workload,
        "query sweep \"tp_size == 2 and num_splits == 4 or status != 'ok'\"",
        "query sweep --layers",
        "query sweep chosen --kernels --sort m",
        "query sweep chosen --training",
        "query sweep 'hidden_fraction > 0.5' --copies --sort matrix_size",
        "query sweep 'chosen and tp_size == 4' --tp-training",
        "query sweep chosen --jobs",
        "report sweep --output out --plots --format csv --fail-if 'hidden_fraction < 0.3'",
    ),
    "damaged": (write_damaged,),
    "traced": (write_traced,),
}
"""By name what writes the run directories into a folder that is not there yet, and commands after the report."""
COMPARISONS = (
    "compare old new",
    "compare a=old b=new --reference b --by slot",
    "compare many/old many/new",
    "compare layers/old layers/new",
    "compare copies/old copies/new",
    "compare cuda rocm",
    "compare cuda=cuda rocm=rocm capped=dips/capped --candidate rocm",
    *(f"compare cuda dips/{name}" for name in ("both_ranks", "blind")),
    "compare big=work/m_training.batch_size=64 small=work/m_training.batch_size=32",
    "compare runs/a runs/b",
    "compare runs/a runs/b --by point",
    "compare ddp=h200x2_fsdp/ddp_one_connection fsdp=h200x2_fsdp/fsdp2",
)
OF_RANKS = (
    "trace ranks --phase all",
    "trace ranks --by rank",
    "trace alone/trace_rank2.json",
    "trace alone --format csv",
    "trace cut.json --median",
    "timeline ranks --output timeline.json",
    "timeline alone --iteration 1 --output timeline.json.gz",
)
