"""A layer with experts on two processes over gloo. Who computes imports Megatron-Core, for two seconds."""

import gzip
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from overlap_sweep.measure import Ranks
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.workloads import layer
from overlap_sweep.workloads.layer import moe
from overlap_sweep.workloads.layer.answer import LayerAnalysis, analyse_layer, described
from overlap_sweep.workloads.layer.config import Moe, Resolved
from overlap_sweep.workloads.layer.moe import VARIANTS, arguments, megatron_arguments, variant_refusal
from overlap_sweep.workloads.layer.result import VariantTimes
from overlap_sweep.workloads.layer.section import card
from tests.make_point import layer_point, make_point, variant
from tests.processes import run_ranks
from tests.results.reading import layer_point as read_layer_point

MODEL = {
    **{"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 48, "gated_experts": True},
    **{"hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    **{"shared_expert_ffn_hidden_size": 32, "normalization": "RMSNorm"},
}


def moe_point(variants: list[str] | None = None, tp_size: int = 1, **options: Any) -> Resolved:
    asked = layer_point(
        backend="auto",
        precision="bf16",
        tp_size=tp_size,
        profile="all",
        runtime={"device": "cpu"},
        model=MODEL,
        workload={"tokens": 32, "repeats": 3},
        layer={"kind": "moe", "variants": variants, "moe": {**asdict(Moe()), **options}},
    )
    completed = decoded_point(layer.WORKLOAD.complete(asked))
    assert isinstance(completed, Resolved)
    assert layer.WORKLOAD.refusal(completed) is None
    return completed


def measured(ranks: Ranks, directory: Path, given: Resolved) -> dict[str, Any]:
    from overlap_sweep.workloads.layer import moe_bench

    return moe_bench.run(given, directory, ranks)


@pytest.mark.end_to_end
@pytest.mark.parametrize(("kind", "micro_batches", "tp_size"), [("balanced", 2, 1), ("random", 3, 1), ("random", 2, 2)])
def test_every_variant_computes_what_none_does(tmp_path: Path, kind: str, micro_batches: int, tp_size: int) -> None:
    variants = ["none", "allgather", "shared_experts", "micro_batches"]
    point = moe_point(variants=variants, routing=kind, micro_batches=micro_batches, tp_size=tp_size)
    found, other = run_ranks(2, measured, tmp_path, point, keep="moe")
    times: dict[str, VariantTimes] = found["measured"].variants
    assert list(times) == [*variants, "floor"]
    assert found["warnings"] == []
    for name in variants[1:]:
        errors = times[name].relative_error
        assert {"output", "output of both", f"input {micro_batches - 1}_grad", "mlp.router.weight_grad"} <= set(errors)
        assert {"mlp.experts.local_experts.1.linear_fc2.weight_grad"} <= set(errors)
        assert max(errors.values()) < 0.02
        assert times[name].arguments == point.layer.moe.arguments[name]
    assert all(list(one.times) == ["fwd", "both", "bwd", "all"] for one in times.values())
    assert other["measured"].variants == times

    moved = {name: communications(tmp_path / trace_file(0, name)) for name in times}
    assert moved["floor"] == 0
    assert moved["micro_batches"] == moved["none"] > 0
    # With tensor parallelism their input is gathered once, while the linear operator gathers it again in its backward.
    assert (moved["shared_experts"] == moved["none"]) == (tp_size == 1)

    # On a CPU a thread moves the tokens of one micro batch while the other is computed.
    for name, in_one in {"none": True, "micro_batches": False}.items():
        moving, computing = (threads(tmp_path / trace_file(0, name), of) for of in ("_AllToAll", "aten::mm"))
        assert bool(moving & computing) == in_one


def threads(trace: Path, operator: str) -> set[int]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["tid"] for event in events if event.get("cat") == "cpu_op" and event["name"] == operator}


def communications(trace: Path) -> int:
    """The number of those within the iterations of a trace."""
    return sum(row.num_comm_events for row in read_trace_file(trace, with_parts=False).rows if row.phase == "all")


def computed(ranks: Ranks, point: Resolved) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """The layer's weights, an input, its output and the experts of its tokens."""
    from overlap_sweep.backends.megatron.layer import Layer, draw_routing
    from overlap_sweep.backends.megatron.schedule import MicroBatch, Sequential

    layer = Layer(point, VARIANTS["none"], ranks, None, silent=False)
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(3))
    routed = draw_routing("random", 32, 4, 2, "x", 1, ranks)
    output = Sequential(layer).first(MicroBatch(x, x, routed)).detach()
    return {name: value.detach() for name, value in layer.module.named_parameters()}, x, output, routed.experts


def test_none_is_a_transformer_layer_whose_tokens_pass_their_experts() -> None:
    ((of, x, output, experts),) = run_ranks(1, computed, replace(moe_point(ep_size=1), precision="fp32"))
    of = {name: weight.double() for name, weight in of.items()}

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * of[f"{name}.weight"]

    def swiglu(name: str, x: Tensor) -> Tensor:
        gate, value = (x @ of[f"{name}.linear_fc1.weight"].t()).chunk(2, -1)
        return functional.silu(gate) * value @ of[f"{name}.linear_fc2.weight"].t()

    x = x.double()
    # Two queries, a key and a value for each of two groups.
    qkv = (norm("input_layernorm", x) @ of["self_attention.linear_qkv.weight"].t()).view(16, 2, 2, 4, 16)
    queries, keys, values = qkv.split((2, 1, 1), dim=3)
    scores = torch.einsum("sbgqd,tbgd->bgqst", queries, keys.squeeze(3)) / 16**0.5
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    attended = torch.einsum("bgqst,tbgd->sbgqd", scores.masked_fill(later, -torch.inf).softmax(-1), values.squeeze(3))
    x = x + attended.flatten(2) @ of["self_attention.linear_proj.weight"].t()
    tokens = norm("pre_mlp_layernorm", x).flatten(0, 1)
    shares = (tokens @ of["mlp.router.weight"].t()).gather(1, experts).softmax(-1)
    mixed = swiglu("mlp.shared_experts", tokens)
    for expert in range(4):
        share = torch.where(experts == expert, shares, 0.0).sum(1, keepdim=True)
        mixed = mixed + share * swiglu(f"mlp.experts.local_experts.{expert}", tokens)
    assert output.flatten(0, 1).double().allclose(x.flatten(0, 1) + mixed, atol=1e-4)


@pytest.mark.parametrize("kind", ["balanced", "random"])
@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_routing(kind: str, chosen: int) -> None:
    from overlap_sweep.backends.megatron.layer import draw_routing

    by_rank = [draw_routing(kind, 40, 8, chosen, "x", 7, Ranks(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    for rank, routed in enumerate(by_rank):
        # Every rank knows what all send.
        assert routed.tokens_per_expert.equal(by_rank[0].tokens_per_expert)
        assert routed.experts.flatten().bincount(minlength=8).equal(routed.tokens_per_expert[rank])
        assert all(len(set(experts)) == chosen for experts in routed.experts.tolist())
        spread = routed.tokens_per_expert[rank]
        assert spread.max() - spread.min() <= 1 or kind == "random"
    assert not by_rank[0].experts.equal(by_rank[1].experts) or chosen == 8


def test_an_all_to_all_shares_no_queue_with_the_computation_beside_it(tmp_path: Path) -> None:
    assert layer.WORKLOAD.workers(moe_point(), tmp_path).max_connections == 8
    assert layer.WORKLOAD.workers(moe_point(tp_size=2), tmp_path).max_connections == 1
    # Tensor-parallel layers need kernels in the order of their launch.
    assert layer.WORKLOAD.workers(layer_point(), tmp_path).max_connections == 1
    assert moe_point(ep_size=1).world_size == 1


def test_the_cpu_stands_for_a_gpu_only_while_a_layer_runs() -> None:
    from overlap_sweep.backends.megatron.layer import cpu_for_cuda

    before = torch.cuda.current_device, torch.cuda.Stream
    with cpu_for_cuda():
        assert torch.cuda.current_device() == torch.device("cpu")
    assert (torch.cuda.current_device, torch.cuda.Stream) == before


def answered(directory: Path, **runtime: Any) -> LayerAnalysis:
    """The analysis of a made-up point, in which `micro_batches` is a tenth faster than `none`."""
    completed = moe_point(ep_size=2)
    given = completed.layer.moe.arguments
    us = {"none": 100.0, "shared_experts": 99.9, "micro_batches": 90.0, "floor": 60.0}
    variants = {
        name: variant([one] * 6, arguments={} if name in ("none", "floor") else given[name]) for name, one in us.items()
    }
    make_point("layer", directory, replace(completed, runtime=replace(completed.runtime, **runtime)), variants=variants)
    return analyse_layer(read_layer_point(directory))


def test_the_answer_is_megatron_lms_arguments(tmp_path: Path) -> None:
    found = card(answered(tmp_path), "m", tmp_path)
    assert found.headline.startswith("Use micro_batches: 10.0% faster than no overlap")
    assert found.use == [
        "--expert-model-parallel-size 2",
        "--moe-token-dispatcher-type alltoall",
        "--overlap-moe-expert-parallel-comm",
    ]
    assert described(answered(tmp_path / "again").point.result.point_as(Resolved)) == [
        "moe",
        "EP=2",
        "balanced routing",
        "2 micro batches",
    ]


@pytest.mark.parametrize(
    ("runtime", "cautioned"),
    [
        ({"device": "cpu"}, ["A CPU has no streams"]),
        ({"device": "cuda", "max_connections": 1}, ["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
        ({"device": "cuda", "max_connections": None}, []),
    ],
)
def test_what_keeps_communication_from_overlapping(
    runtime: dict[str, Any], cautioned: list[str], tmp_path: Path
) -> None:
    cautions = answered(tmp_path, **runtime).cautions
    assert all(caution.startswith(begin) for caution, begin in zip(cautions, cautioned, strict=True))


def point(device: str = "cuda", precision: str = "bf16", shared: int | None = 64, **options: int | None) -> Any:
    moe = {"ep_size": 2, "micro_batches": 2, "num_sm": None, **options}
    model = {"shared_expert_ffn_hidden_size": shared}
    return layer_point(device=device, precision=precision, model=model, layer={"moe": moe})


def test_every_argument_is_one_of_megatron_cores() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    for name in VARIANTS:
        assert set(arguments(name, 8)) <= known


@pytest.mark.parametrize(("num_sm", "given"), [(None, 20), (24, 24)])
def test_only_deepep_has_a_number_of_sms(num_sm: int | None, given: int) -> None:
    found = {name: arguments(name, num_sm).get("moe_deepep_num_sms") for name in VARIANTS}
    assert found == {name: given if "deepep" in name else None for name in VARIANTS}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, {"deepep", "deepep_micro_batches"}),
        ({"device": "cpu"}, {"deepep", "deepep_micro_batches"}),
        ({"precision": "fp32"}, {"micro_batches", "deepep", "deepep_micro_batches"}),
        ({"micro_batches": 1}, {"micro_batches", "deepep", "deepep_micro_batches"}),
        ({"shared": None}, {"shared_experts", "deepep", "deepep_micro_batches"}),
        ({"ep_size": 1}, set(VARIANTS) - {"none"}),
    ],
)
def test_variants_that_cannot_run_here(
    changes: dict[str, Any], refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "find_spec", lambda name: None)
    assert {name for name in VARIANTS if variant_refusal(name, point(**changes))} == refused


def test_deepep_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "find_spec", lambda name: object())
    assert variant_refusal("deepep_micro_batches", point(num_sm=24)) is None
    assert "even" in str(variant_refusal("deepep", point(num_sm=7)))


def test_megatron_lms_arguments() -> None:
    assert megatron_arguments(arguments("deepep_micro_batches", 24), ep_size=8) == [
        "--expert-model-parallel-size 8",
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend deepep",
        "--overlap-moe-expert-parallel-comm",
        "--moe-deepep-num-sms 24",
    ]
