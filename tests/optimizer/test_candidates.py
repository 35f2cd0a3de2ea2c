"""What is worth trying in a training, as data: from what its recording shows and what is predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from overlap_sweep.diagnosis import Finding
from overlap_sweep.errors import UsageError
from overlap_sweep.levers import named
from overlap_sweep.levers.training import Training
from overlap_sweep.optimizer.candidates import (
    OF_BOUND,
    Candidate,
    Collecting,
    Recorded,
    allowed,
    as_timed,
    candidates,
)
from overlap_sweep.optimizer.groups import Purpose
from overlap_sweep.predict.predictions import Prediction, Status
from overlap_sweep.results.records import Expected
from overlap_sweep.workloads.job.result import JobRun
from tests.make_point import timing

DDP = Training(libraries={"ddp", "optimizer"})


def predicted(change: str, predicted_us: float | None, status: Status = "predicted") -> Prediction:
    known = predicted_us is not None
    return Prediction(
        change=change,
        step_us=100.0,
        predicted_us=predicted_us,
        low_us=predicted_us - 5 if predicted_us is not None else None,
        high_us=predicted_us + 5 if predicted_us is not None else None,
        gain_us=100 - predicted_us if predicted_us is not None else None,
        gain_low_us=95 - predicted_us if predicted_us is not None else None,
        gain_high_us=105 - predicted_us if predicted_us is not None else None,
        critical="",
        reason="" if known else "no sizes",
        status=status,
    )


def found(
    *names: str,
    training: Training = DDP,
    shares: Mapping[str, float] | None = None,
    times_us: Mapping[str, float | None] | None = None,
    status: Status = "predicted",
    environment: Mapping[str, str] | None = None,
    recordings: Sequence[Mapping[str, float | None]] = (),
    advice: str = "",
    inspected: Mapping[tuple[str, object], str] | None = None,
    purposes: Sequence[Purpose] = (),
    cores: int | None = None,
    collectives: Mapping[str, Mapping[str, float]] | None = None,
    nccl_version: str = "2.28.9",
    nodes: int = 1,
    collecting: Collecting | None = None,
    findings: Sequence[Finding] = (),
) -> tuple[dict[str, Candidate], dict[str, str]]:
    def predict(changes: Sequence[str]) -> list[Prediction]:
        return [
            predicted(change, time, status)
            for times in (times_us or {}, *recordings)
            for change, time in times.items()
            if change in changes
        ]

    known = {"issued_late": 0.2} if shares is None else shares
    seen = inspected or {}
    recorded = Recorded(
        training,
        known,
        findings,
        advice,
        predict,
        environment or {},
        purposes=purposes,
        collectives=collectives or {},
        nccl_version=nccl_version,
        nodes=nodes,
        cores=cores,
        collecting=collecting,
        inspected=seen,
    )
    tried, left_out = candidates(recorded, named(names))
    return {one.name: one for one in tried}, left_out.not_here | left_out.useless


def test_predicted_gains_come_with_their_interval_the_best_first() -> None:
    tried, _ = found("ddp.bucket_cap_mb", times_us={"ddp.bucket_cap_mb=4": 90.0, "ddp.bucket_cap_mb=1": 108.0})
    four, one = tried["ddp.bucket_cap_mb=4"], tried["ddp.bucket_cap_mb=1"]
    assert four.expected
    assert (four.expected.is_predicted, four.expected.why) == (True, "ddp.bucket_cap_mb=4")
    assert (four.expected.gain, four.expected.low, four.expected.high) == pytest.approx((0.1, 0.05, 0.15))
    assert (four.in_words, one.in_words) == ("+10.0% (5.0 to 15.0)", "-8.0% (-13.0 to -3.0)")
    assert [*tried][-1] == "ddp.bucket_cap_mb=1"
    # Where none is given, the first bucket is smaller than with any value.
    assert "ddp.bucket_cap_mb=25" in tried


def test_of_levers_for_one_cause_the_advised_comes_first() -> None:
    loading = Training(libraries={"ddp", "loader"})
    advice = "Load ahead: DataLoader(num_workers=4, persistent_workers=True)"
    tried, _ = found("ddp", "loader", training=loading, shares={"host_bound": 0.8}, advice=advice)
    assert [*tried][:4] == [f"loader.num_workers={number}" for number in (4, 1, 2, 8)]


def test_recordings_that_disagree_widen_the_interval() -> None:
    once, again = {"ddp.bucket_cap_mb=4": 190.0}, {"ddp.bucket_cap_mb=4": 90.0}
    tried, _ = found("ddp.bucket_cap_mb", times_us=once, recordings=[again])
    four = tried["ddp.bucket_cap_mb=4"].expected
    assert four
    assert (four.gain, four.low, four.high) == pytest.approx((-0.4, -0.95, 0.15))


def test_what_a_script_may_have_changed_can_be_set_back_to_the_default() -> None:
    tried, _ = found("ddp", shares={"issued_late": 0.2, "host_bound": 0.1}, times_us={"ddp.bucket_cap_mb=25": 80.0})
    assert tried["ddp.bucket_cap_mb=25"].gain == pytest.approx(0.2)
    assert "ddp.find_unused_parameters=false" in tried


def test_without_a_prediction_the_cause_that_it_mends_is_a_bound() -> None:
    tried, _ = found("ddp.bucket_cap_mb", times_us={"ddp.bucket_cap_mb=4": None})
    four = tried["ddp.bucket_cap_mb=4"]
    assert four.expected == Expected(OF_BOUND * 0.2, 0.0, 0.2, why="issued_late")
    assert four.in_words == "+7.6%, at most 20.0% (issued_late)"


def test_what_gains_at_least_as_much_is_a_bound() -> None:
    loading = Training(libraries={"loader"})
    tried, _ = found(
        "loader.num_workers", training=loading, shares={"host_bound": 0.5}, times_us={"loader.ready=true": 60.0}
    )
    one = tried["loader.num_workers=1"].expected
    assert one
    assert (one.is_predicted, one.high, one.why) == (False, pytest.approx(0.45), "loader.ready=true")


def straggling(evidence: str, share: float) -> Finding:
    return Finding(
        cause="straggler",
        lost_us=100 * share,
        share=share,
        rank=1,
        process_group="",
        collective="all_reduce",
        where="",
        evidence=evidence,
    )


def test_a_lever_needs_a_finding_whose_evidence_is_what_it_mends() -> None:
    training = Training(libraries={"nccl"})
    late = straggling("is idle for 9 us more, since its host launches late", 0.4)
    wanted = ("allocator.expandable_segments",)
    _, left_out = found(*wanted, training=training, shares={"straggler": 0.4}, findings=[late])
    assert left_out == {wanted[0]: "it mends host_sync, straggler, which the recording does not show"}

    allocates = straggling("is idle for 9 us more in cudaMalloc", 0.1)
    tried, _ = found(*wanted, training=training, shares={"straggler": 0.4}, findings=[late, allocates])
    assert tried["allocator.expandable_segments=true"].in_words == "+3.8%, at most 10.0% (straggler)"


def test_what_a_training_does_not_do_it_cannot_be_spared() -> None:
    training, wanted = Training(libraries={"nccl"}), ("host.non_blocking", "host.compile_blocks", "activations")
    bounds = dict.fromkeys(("host.sync=none", "kernels.fused=true+host.launch=graph", "activations.recompute=false"))
    tried, left_out = found(*wanted, training=training, shares={"host_bound": 0.3}, times_us=bounds)
    assert left_out == {"host.non_blocking": "no sizes", "activations.recompute": "no sizes"}
    assert tried["host.compile_blocks=true"].in_words == "+11.4%, at most 30.0% (host_bound)"


def test_compiling_is_tried_where_kernels_can_be_fused_though_no_cause_calls_for_it() -> None:
    words = ["torchrun", "-m", "torchtitan.train"]
    change = "kernels.fused=true+host.launch=graph"
    training = Training(libraries={"nccl"}, words=words)
    tried, _ = found("torchtitan.compile", training=training, shares={}, times_us={change: 80.0}, status="bound")
    assert tried["torchtitan.compile=true"].in_words == f"+7.6%, at most 25.0% ({change})"
    _, left_out = found("torchtitan.compile", training=training, shares={}, times_us={change: 99.5}, status="bound")
    assert left_out == {"torchtitan.compile": "no cause calls for it, and it could gain 0.5% of a step at most"}


def test_what_is_predicted_to_change_nothing_is_not_tried() -> None:
    tried, _ = found("ddp.bucket_cap_mb", times_us={"ddp.bucket_cap_mb=4": 100.0, "ddp.bucket_cap_mb=1": 99.0})
    assert "ddp.bucket_cap_mb=1" in tried
    assert "ddp.bucket_cap_mb=4" not in tried


def test_what_was_seen_to_change_nothing_is_left_out_with_the_reason() -> None:
    alone, there = "does not apply: a step of this training has one microbatch", "is there already"
    inspected = {
        ("ddp.no_sync", True): alone,
        ("ddp.bucket_cap_mb", 1): there,
        ("ddp.bucket_cap_mb", 4): "",
        ("ddp.bucket_cap_mb", 25): "",
        ("ddp.static_graph", True): "",
    }
    tried, left_out = found("ddp", shares={"issued_late": 0.2, "bandwidth": 0.1}, inspected=inspected)
    assert left_out["ddp.no_sync"] == alone
    assert left_out["ddp.bucket_cap_mb=1"] == there
    # What the script has is another value, though nothing predicts what the default gains.
    assert {"ddp.bucket_cap_mb=4", "ddp.bucket_cap_mb=25", "ddp.static_graph=true"} <= {*tried}
    assert {"ddp.bucket_cap_mb", "ddp.bucket_cap_mb=1", "ddp.no_sync=true"}.isdisjoint(tried)


def test_no_more_processes_load_data_than_a_rank_has_cores() -> None:
    loading = Training(libraries={"loader"})
    tried, left_out = found("loader.num_workers", training=loading, shares={"host_bound": 0.5}, cores=2)
    assert [*tried] == ["loader.num_workers=1", "loader.num_workers=2"]
    why = "each rank has 2 cores; where loading waits for a disk or a network, sweep it with launch"
    assert left_out == {f"loader.num_workers={number}": why for number in (4, 8)}


def test_without_a_cause_what_spares_the_host_work_comes_last_unless_the_trace_rules_it_out() -> None:
    applying = {
        (name, value): ""
        for name in ("host.collect_every", "loader.num_workers", "optimizer.fused", "fsdp2.prefetch")
        for value in named([name])[name].values
    }
    inspected = {**applying, ("host.compile_blocks", True): "does not apply: nothing is repeated"}
    bounds: dict[str, float | None] = {"optimizer.step=none": 90.0, "loader.ready=true": 99.5}
    tried, left_out = found(
        *("host", "loader.num_workers", "optimizer", "fsdp2.prefetch"),
        training=Training(libraries={"loader", "optimizer", "fsdp2"}, on_cpu=True),
        shares={},
        times_us=bounds,
        status="bound",
        inspected=inspected,
    )
    assert [*tried] == ["optimizer.fused=true", "host.collect_every=50", "host.collect_every=200"]
    fused = tried["optimizer.fused=true"].expected
    assert fused
    assert (fused.gain, fused.high, fused.why) == pytest.approx((OF_BOUND * 0.1, 0.15, "optimizer.step=none"))
    assert left_out["loader.num_workers"] == "no cause calls for it, and it could gain 0.5% of a step at most"
    assert left_out["host.compile_blocks"] == "does not apply: nothing is repeated"
    assert left_out["fsdp2.prefetch"] == "it mends issued_late, dependency, which the recording does not show"


def test_what_the_host_waits_for_data_is_not_expected_of_other_levers() -> None:
    loading = Training(libraries={"ddp", "loader"}, on_cpu=True)
    tried, _ = found(
        *("loader.num_workers", "host.collect_every"),
        training=loading,
        shares={"host_bound": 0.8},
        times_us={"loader.ready=true": 25.0},
    )
    assert next(iter(tried)) == "loader.num_workers=1"
    collecting = tried["host.collect_every=50"].expected
    assert collecting
    assert collecting.high == pytest.approx(0.05)


def test_garbage_that_is_collected_for_long_in_few_steps_needs_no_trial() -> None:
    levers, busy = ("host.collect_every", "loader.num_workers"), {"host_bound": 0.3}
    tried, _ = found(*levers, shares=busy, collecting=Collecting(0.04, 0, 60))
    often = tried["host.collect_every=50"].expected
    assert often
    assert (often.high, often.why) == (0.04, "collecting garbage")
    for collecting, reason in (
        (
            Collecting(0.04, 2, 60),
            "Python collects garbage for long in 2 of 60 steps, which don't count; it could gain 4.0%",
        ),
        (Collecting(0.002, 0, 60), "collecting garbage takes 0.2% of a step"),
    ):
        tried, left_out = found(*levers, shares=busy, collecting=collecting)
        assert not tried
        assert left_out["host.collect_every"].startswith(reason)


def test_what_the_profiler_made_late_is_no_gain() -> None:
    def gains(change: str, **run: Any) -> tuple[float | None, ...]:
        timed = as_timed(predicted(change, 75.0), JobRun(step=timing(88.0), **{"timed_by": "gpu", **run}))
        return timed.gain_low_us, timed.gain_us, timed.gain_high_us

    assert gains("host.launch=graph", profiled_us=100.0) == (8.0, 13.0, 18.0)
    assert gains("host.launch=graph", profiled_us=112.0) == (0.0, 1.0, 6.0)
    assert gains("host.launch=graph", profiled_us=80.0) == (20.0, 25.0, 30.0)
    # What is not the host's, or was not timed on a GPU, is as it was recorded.
    assert gains("ddp.bucket_cap_mb=4", profiled_us=112.0) == (20.0, 25.0, 30.0)
    assert gains("host.launch=graph", profiled_us=112.0, timed_by="metric") == (20.0, 25.0, 30.0)


def test_what_the_recording_does_not_need_is_left_out_with_the_reason() -> None:
    tried, left_out = found("fsdp2", "ddp.gradient_as_bucket_view", "loader.num_workers")
    assert not tried
    assert left_out["fsdp2.prefetch"] == "the trace shows no fsdp2"
    assert left_out["loader.num_workers"] == "the trace shows no loader"
    assert left_out["ddp.gradient_as_bucket_view"] == "it mends host_bound, which the recording does not show"
    _, on_cpu = found("cuda.max_connections", training=Training(libraries=set(), on_cpu=True))
    assert on_cpu["cuda.max_connections"] == "it has a meaning on GPUs, and the trace has none"


def test_variables_that_are_set_so_already_are_no_change() -> None:
    gpu = {"training": Training(libraries=set()), "shares": {"queue_order": 0.1}}
    tried, _ = found("cuda.max_connections", **gpu)  # type: ignore[arg-type]
    assert {*tried} == {"cuda.max_connections=1", "cuda.max_connections=32"}
    tried, _ = found("cuda.max_connections", **gpu, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})  # type: ignore[arg-type]
    assert {*tried} == {"cuda.max_connections=8", "cuda.max_connections=32"}


DP, TP = (("mesh_dp", (0, 2)),), (("mesh_tp", (0, 1)),)
ON_GPUS = Training(libraries={"nccl"})


def test_process_groups_are_tried_each_with_what_its_causes_call_for() -> None:
    dp = Purpose(DP, ["mesh_dp"], 16, {"contention": 0.1})
    tp = Purpose(TP, ["mesh_tp"], 24, {"bandwidth": 0.2, "dependency": 0.3})

    tried, left_out = found(
        "group",
        training=ON_GPUS,
        shares={"contention": 0.1, "bandwidth": 0.2},
        times_us={"nccl.max_ctas=mesh_dp:8": 95.0},
        purposes=[dp, tp],
    )

    assert {one.groups for one in tried.values()} == {"mesh_dp", "mesh_tp"}
    by_lever = {name for name in tried if "ctas" in name}
    # As many thread blocks as they have, or more, change nothing.
    assert by_lever == {*(f"group.max_ctas=mesh_dp:{blocks}" for blocks in (2, 4, 8)), "group.min_ctas=mesh_tp:32"}
    assert tried["group.max_ctas=mesh_dp:8"].gain == pytest.approx(0.05)
    least = tried["group.min_ctas=mesh_tp:32"].expected
    assert least
    assert (least.high, least.why) == (0.2, "bandwidth")
    assert tried["group.high_priority=mesh_dp:true"].needs == "exact"
    assert not left_out


def test_one_purpose_needs_no_values_of_groups() -> None:
    only = Purpose(DP, (), 24, {"contention": 0.1})
    tried, left_out = found("group", "nccl", training=ON_GPUS, shares={"contention": 0.1}, purposes=[only])
    assert "nccl.max_ctas=8" in tried
    assert left_out["group.max_ctas"].endswith("for which nccl.max_ctas sets it")

    tried, _ = found("group.max_ctas", training=ON_GPUS, shares={"contention": 0.1}, purposes=[only])
    assert {one.groups for one in tried.values()} == {""}


def test_what_is_allowed_says_what_is_tried() -> None:
    tried, _ = found("ddp", shares={"issued_late": 0.1, "bandwidth": 0.1})
    needs = {name.partition("=")[0]: one.needs for name, one in tried.items()}
    assert needs["ddp.static_graph"] == "exact"
    assert needs["ddp.bucket_cap_mb"] == "rounding"
    assert needs["ddp.compress_bf16"] == "training"
    assert [allowed("rounding", allow) for allow in ("exact", "rounding", "training")] == [False, True, True]


def test_a_misspelt_lever_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown lever fsdp9. Did you mean fsdp[12]\?"):
        found("fsdp9")


def test_algorithm_and_protocol_are_tried_for_the_collectives_that_they_suit() -> None:
    suffering = {"all_reduce": {"bandwidth": 0.3}, "all_gather": {"latency": 0.05}, "broadcast": {"latency": 0.1}}
    shares = {"bandwidth": 0.3, "latency": 0.1}
    tried, _ = found("nccl.proto", "nccl.algo", shares=shares, collectives=suffering)
    most = {name: one.expected.high for name, one in tried.items() if one.expected}
    assert most == {
        "nccl.proto=allreduce:Simple": 0.3,
        "nccl.proto=allreduce:LL128": 0.3,
        "nccl.algo=allreduce:Ring": 0.3,
        "nccl.algo=allreduce:Tree": 0.3,
        # LL moves as many flags as data.
        "nccl.proto=allgather:LL128": 0.05,
        "nccl.proto=allgather:LL": 0.05,
    }
    tried, left_out = found("nccl.proto", shares=shares, collectives=suffering, nccl_version="2.21.5")
    assert (tried, left_out) == ({}, {"nccl.proto": "it is tried for one collective at a time, which needs NCCL 2.24"})


def test_what_has_a_meaning_between_nodes_is_tried_there_alone() -> None:
    name = "nccl.nchannels_per_net_peer"
    assert found(name, shares={"bandwidth": 0.3}) == ({}, {name: "it has a meaning between nodes alone"})
    tried, _ = found(name, shares={"bandwidth": 0.3}, nodes=2)
    assert [*tried] == [f"{name}={number}" for number in (2, 4, 8)]
