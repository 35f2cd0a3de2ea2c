"""Whole layers of the backends that compute on a CPU against the unsharded layer, in float64, on fresh
random numbers; and which slots overlap under which switches. symm_mem is here on its stand-in."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import overlap_sweep.backends.torch as plain
from overlap_sweep import backends
from overlap_sweep.backends import ParallelLayer, symm_mem
from overlap_sweep.backends.torch import overlap
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.workloads import layer as layer_variants
from overlap_sweep.workloads.layer.config import Resolved
from tests.backends import symm_mem_on_cpu
from tests.make_point import layer_point
from tests.processes import run_ranks

CPU = torch.device("cpu")
TOKENS = 24
LLAMA = {"hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 8}
GPT = {**LLAMA, "num_kv_heads": 4, "gated_mlp": False, "normalization": "LayerNorm", "bias": True}
NONE = OverlapConfig(switches={})
ASYNC_TP = OverlapConfig()
RING, BULK = {"method": "ring_exchange"}, {"method": "bulk"}
BULK_ALONE = OverlapConfig(
    dict.fromkeys(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), BULK),
    {**SWITCH_DEFAULTS, "tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False},
)
FUSED = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
ALL_ON = {**SWITCH_DEFAULTS, "tp_comm_overlap_rs_dgrad": True}


def torch_point(kind: str = "transformer_layer", **changes: Any) -> Resolved:
    changes = {"backend": "torch", "runtime": {"device": "cpu"}, "model": LLAMA, **changes}
    layer = {"kind": kind, "micro_batch_size": 2}
    return layer_point(precision="fp32", workload={"tokens": TOKENS}, layer=layer, **changes)


def symm_mem_point(kind: str = "transformer_layer", **changes: Any) -> Resolved:
    return torch_point(kind, **{"backend": "symm_mem", "runtime": {"device": "cuda"}, **changes})


def one_slot(slot: str, method: str) -> OverlapConfig:
    scatters = space.OPERATORS[slot.partition("_")[0]] == "column" and method != "bulk"
    return OverlapConfig(
        {slot: {"method": method, "num_sm": 2}}, {**SWITCH_DEFAULTS, "tp_comm_overlap_rs_dgrad": scatters}
    )


def presets(point: Resolved, *names: str) -> dict[str, OverlapConfig]:
    return layer_variants.configurations(replace(point, layer=replace(point.layer, variants=list(names))))


WHOLE = torch_point(num_sm=2)
CASES: dict[str, tuple[dict[str, Any], OverlapConfig]] = {
    **{f"{kind}-none": (torch_point(kind), NONE) for kind in space.LAYER_KINDS},
    **{f"{kind}-gpt": (torch_point(kind, model=GPT), NONE) for kind in space.LAYER_KINDS},
    **{f"{kind}-split": (torch_point(kind), presets(WHOLE, "split")["split"]) for kind in space.LAYER_KINDS},
    **{
        f"{slot}-{method}": (WHOLE, one_slot(slot, method))
        for slot, methods in space.SLOTS.items()
        for method in methods
    },
    **{
        name: (WHOLE, config)
        for name, config in presets(WHOLE, "bulk", "ring_exchange", "pipeline", "rs_dgrad").items()
    },
    "gpt-ring_exchange": (torch_point(model=GPT, num_sm=2), presets(WHOLE, "ring_exchange")["ring_exchange"]),
}
CASES = {f"torch-{name}": case for name, case in CASES.items()} | {
    **{f"symm_mem-{kind}-async TP": (symm_mem_point(kind), ASYNC_TP) for kind in space.LAYER_KINDS},
    "symm_mem-gpt-async TP": (symm_mem_point(model=GPT), ASYNC_TP),
    "symm_mem-none": (symm_mem_point(), NONE),
    "symm_mem-bulk": (symm_mem_point(), BULK_ALONE),
}


def unsharded(point: Mapping[str, Any], x: Tensor, of_rank: list[dict[str, Tensor]]) -> Tensor:
    """The layer on all of its input, from the weights of all ranks."""
    model, batch, kind = point["model"], point.layer.micro_batch_size, point.layer.kind

    def norm(name: str, x: Tensor) -> Tensor:
        weight, bias = (of_rank[0].get(f"{name}.{part}") for part in ("weight", "bias"))
        if model["normalization"] == "LayerNorm":
            return functional.layer_norm(x, x.shape[1:], weight, bias, 1e-5)
        return functional.rms_norm(x, x.shape[1:], weight, 1e-5)

    def column(name: str, x: Tensor) -> list[Tensor]:
        return [x @ its[f"{name}weight"].t() + its.get(f"{name}bias", 0.0) for its in of_rank]

    def row(name: str, parts: list[Tensor]) -> Tensor:
        products = (part @ its[f"{name}weight"].t() for part, its in zip(parts, of_rank, strict=True))
        return sum(products) + of_rank[0].get(f"{name}bias", 0.0)  # type: ignore[return-value]

    def attend(qkv: Tensor) -> Tensor:
        queries, others = (model[name] // len(of_rank) for name in ("num_attention_heads", "num_kv_heads"))
        by_head = qkv.view(-1, batch, queries + 2 * others, model["head_dim"])
        q, k, v = by_head.split((queries, others, others), dim=2)
        q, k, v = (it.permute(1, 2, 0, 3) for it in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)

    def activate(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=1)
        return functional.silu(gate) * value if model["gated_mlp"] else functional.gelu(x, approximate="tanh")

    def attention(name: str, x: Tensor) -> Tensor:
        return row(f"{name}proj.", [attend(qkv) for qkv in column(f"{name}qkv.", norm(f"{name}norm", x))])

    def mlp(name: str, x: Tensor) -> Tensor:
        return row(f"{name}fc2.", [activate(part) for part in column(f"{name}fc1.", norm(f"{name}norm", x))])

    if kind == "linear":
        return row("", list(x.chunk(len(of_rank), dim=1)))
    if kind == "layernorm_linear":
        return torch.cat(column("qkv.", norm("norm", x)), dim=1)
    if kind == "transformer_layer":
        x = x + attention("attention.block.", x)
        return x + mlp("mlp.block.", x)
    return attention("", x) if kind == "multihead_attention" else mlp("", x)


def is_replicated(kind: str, name: str) -> bool:
    """What every rank holds whole: norms, and the biases of row-parallel operators."""
    return "norm." in name or name.endswith(("proj.bias", "fc2.bias")) or (kind == "linear" and name == "bias")


def perturb(layer: ParallelLayer, kind: str, seed: int, rank: int) -> None:
    """Norms and biases start out at 1 and 0, which would hide that one is forgotten."""
    own, common = (torch.Generator().manual_seed(seed + offset) for offset in (rank + 1, 0))
    for name, parameter in layer.module.named_parameters():
        if parameter.dim() == 1:
            drawn = torch.randn(parameter.shape, generator=common if is_replicated(kind, name) else own)
            parameter.data += drawn.to(parameter.device) / 4


def errors_of_layer(ranks: Ranks, point: dict[str, Any], config: OverlapConfig, seed: int) -> dict[str, float]:
    """By tensor, the largest error of this rank's output and gradients over the reference's largest value."""
    kind, rank, world = point.layer.kind, ranks.rank, ranks.world_size
    layer = backends.load(point.backend).build_layer(
        point, "none" if config is NONE else "point", config, ranks, seed + rank
    )
    perturb(layer, kind, seed, rank)
    ours = dict(layer.module.named_parameters())
    of_rank: list[Any] = [None] * world
    dist.all_gather_object(of_rank, {name: parameter.detach().double().cpu() for name, parameter in ours.items()})
    for its in of_rank:
        # One tensor for all ranks, as it is in the unsharded layer.
        its |= {name: of_rank[0][name] for name in its if is_replicated(kind, name)}
        for tensor in its.values():
            tensor.requires_grad_()

    # A rank's input is its part of the features where the layer is the bare row-parallel operator, else of the rows.
    cut, features = (1, layer.input_shape[1] * world) if kind == "linear" else (0, layer.input_shape[1])
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, features, generator=random, dtype=torch.float64).requires_grad_()
    expected = unsharded(point, x, of_rank)
    gradient = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    expected.backward(gradient)

    own_x = x.detach().chunk(world, cut)[rank].float().contiguous().to(ranks.device).requires_grad_()
    assert tuple(own_x.shape) == layer.input_shape
    output = layer.forward(layer.module, own_x, False)
    out_cut = 1 if kind == "layernorm_linear" else 0
    output.backward(gradient.chunk(world, out_cut)[rank].float().to(ranks.device))

    assert x.grad is not None
    pairs: dict[str, Any] = {"output": (output, expected.chunk(world, out_cut)[rank])}
    pairs["input"] = own_x.grad, x.grad.chunk(world, cut)[rank]
    for name, parameter in ours.items():
        found = parameter.grad
        if "norm." in name:
            # Each rank's is the sum over its own rows.
            dist.all_reduce(found)
        pairs[name] = found, of_rank[rank][name].grad
    return {name: ((a.double().cpu() - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def errors_of_cases(ranks: Ranks, seed: int, names: list[str]) -> dict[str, tuple[dict[str, float], list[str]]]:
    """And the operators of symmetric memory that each case called, in order."""
    found = {}
    for name in names:
        point, config = CASES[name]
        if point.backend == "symm_mem":
            symm_mem_on_cpu.stand_in()
        symm_mem_on_cpu.called.clear()
        errors = errors_of_layer(ranks, point, config, seed)
        found[name] = errors, list(symm_mem_on_cpu.called)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[dict[str, float], list[str]]]]:
    return run_ranks(2, errors_of_cases, secrets.randbits(40), list(CASES), keep="cpu")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_layer(found: list[dict[str, tuple[dict[str, float], list[str]]]], name: str) -> None:
    for of_rank in found:
        errors, called = of_rank[name]
        assert {"output", "input"} < set(errors)
        assert max(errors.values()) < 1e-4, errors
        if name == "symm_mem-bulk":
            assert set(called) == {"_low_contention_all_gather", "_low_contention_reduce_scatter"}
        elif name in ("symm_mem-transformer_layer-async TP", "symm_mem-gpt-async TP"):
            # Forward gathers for qkv and fc1, and scatters after proj and fc2; backward the same the other way round.
            assert called == FUSED * 4
        elif "async TP" not in name:
            assert called == []


@pytest.mark.gpu(count=2)
def test_equals_the_unsharded_layer_on_nccl() -> None:
    names = [name for name in CASES if name.startswith("torch")]
    for of_rank in run_ranks(2, errors_of_cases, secrets.randbits(40), names, device="cuda"):
        assert max(error for errors, _ in of_rank.values() for error in errors.values()) < 1e-4


PIPELINE = {"method": "pipeline", "num_splits": 2}
SLOTS = {
    slot: {**(PIPELINE if slot in ("proj_fprop", "fc2_fprop") else RING), "num_sm": number}
    for number, slot in enumerate((slot for slot in space.SLOTS if not slot.endswith("wgrad")), start=1)
}
BULK_SLOTS = {
    slot: {"method": "bulk", "num_sm": number}
    for number, slot in enumerate(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), start=1)
}
BULK_ON = {"tp_comm_overlap_rs_dgrad": False}
SWITCHED = {
    "all on": (SLOTS, {}, set(SLOTS)),
    "all off": (SLOTS, {"tp_comm_overlap": False}, set()),
    "ag off": (SLOTS, {"tp_comm_overlap_ag": False}, {"qkv_dgrad", "fc1_dgrad", "proj_fprop", "fc2_fprop"}),
    "rs off": (SLOTS, {"tp_comm_overlap_rs": False}, set(SLOTS) - {"proj_fprop", "fc2_fprop"}),
    **{
        f"{operator} off": (
            SLOTS,
            {f"tp_comm_overlap_disable_{operator}": True, "tp_comm_bulk_dgrad": False},
            set(SLOTS) - {f"{operator}_fprop", f"{operator}_dgrad"},
        )
        for operator in ("fc1", "qkv")
    },
    "bulk on": (BULK_SLOTS, BULK_ON, set(BULK_SLOTS)),
    "bulk dgrad off": (BULK_SLOTS, {**BULK_ON, "tp_comm_bulk_dgrad": False}, {"qkv_wgrad", "fc1_wgrad"}),
    "bulk wgrad off": (BULK_SLOTS, {**BULK_ON, "tp_comm_bulk_wgrad": False}, {"qkv_dgrad", "fc1_dgrad"}),
}
"""Slots and changed switches, and which slots are left to overlap; each has a share of its own to be known by."""


class Recorded:
    """A communicator that notes its share when it is used."""

    def __init__(self, communicator: Any, num_sm: int | None, used: set[int | None]) -> None:
        self._communicator, self._num_sm, self._used = communicator, num_sm, used

    def __getattr__(self, operation: str) -> Any:
        self._used.add(self._num_sm)
        return getattr(self._communicator, operation)


def shares_used(ranks: Ranks) -> dict[str, set[int | None]]:
    """By case, the num_sm of every communicator that took part in a forward and backward."""
    found = {}
    used: set[int | None] = set()
    make = overlap.communicator

    def recorded(ranks: Ranks, num_sm: int | None, cga_size: int | None, replicas: int) -> Any:
        return Recorded(make(ranks, num_sm, cga_size, replicas), num_sm, used)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(overlap, "communicator", recorded)
    for name, (slots, switches, _) in SWITCHED.items():
        layer = plain.build_layer(torch_point(), "point", OverlapConfig(slots, {**ALL_ON, **switches}), ranks, 0)
        used.clear()
        x = torch.randn(layer.input_shape, requires_grad=True)
        layer.forward(layer.module, x, False).sum().backward()
        found[name] = set(used)
    monkeypatch.undo()
    return found


def test_only_the_slots_that_are_switched_on_overlap() -> None:
    for found in run_ranks(2, shares_used, keep="cpu"):
        for name, (slots, _, on) in SWITCHED.items():
            assert found[name] - {None} == {slots[slot]["num_sm"] for slot in on}, name
        assert found["all off"] == {None}


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
def test_the_floor_communicates_nothing_and_has_all_shapes(kind: str) -> None:
    # There is no process group here that it could communicate in.
    assert not dist.is_initialized()
    for rank in range(2):
        layer = plain.build_layer(torch_point(kind, model=GPT), "floor", NONE, Ranks(rank, 2, CPU), 0)
        x = torch.randn(layer.input_shape, requires_grad=True)
        output = layer.forward(layer.module, x, False)
        rows, columns = (TOKENS, 3 * 4 * 8 // 2) if kind == "layernorm_linear" else (TOKENS // 2, 24)
        assert tuple(output.shape) == (rows, columns)
        output.backward(torch.randn_like(output))
        for tensor in (x, *layer.module.parameters()):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
            assert tensor.grad.abs().max() > 0


def test_what_is_gathered_on_the_floor_are_numbers_and_no_copy_is_made_twice() -> None:
    silent = overlap.by_collectives(Ranks(1, 3, CPU), silent=True)({})
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    gathered = silent.all_gather(first).wait()
    assert gathered.equal(torch.cat([first] * 3))
    # Not even a view is made anew: what the host takes for it would be the floor's.
    assert silent.all_gather(second).wait() is gathered
    full = torch.randn(6, 4)
    scattered = silent.reduce_scatter(full).wait()
    assert scattered.equal(full[2:4])
    assert scattered.data_ptr() == full[2:4].data_ptr()


def test_variants_have_the_same_weights_in_the_precision() -> None:
    ranks = Ranks(0, 2, CPU)
    in_bf16 = replace(torch_point(model=GPT), precision="bf16")
    asked = ((torch_point(), 3), (torch_point(), 3), (torch_point(), 4), (in_bf16, 3))
    built = [plain.build_layer(point, "floor", NONE, ranks, seed) for point, seed in asked]
    weights, same, other, rounded = (dict(layer.module.named_parameters()) for layer in built)
    assert all(tensor.equal(same[name]) for name, tensor in weights.items())
    assert not weights["mlp.block.fc1.weight"].equal(other["mlp.block.fc1.weight"])
    assert weights["mlp.block.fc2.weight"].std().item() == pytest.approx(24**-0.5, rel=0.2)
    assert {parameter.dtype for parameter in weights.values()} == {torch.float32}
    assert {parameter.dtype for parameter in rounded.values()} == {torch.bfloat16}


def test_who_computes_attention_is_named() -> None:
    name, warnings = plain.attention(torch_point(), Ranks(0, 2, CPU))
    assert name in {f"{kernel} (torch)" for kernel in ("flash", "memory-efficient", "unfused")}
    assert warnings == []


def test_the_default_is_async_tp_on_every_slot() -> None:
    point = symm_mem_point()
    assert layer_variants.names(point) == ["none", "default", "rs_dgrad", "ring_exchange", "bulk", "floor"]
    config = layer_variants.configurations(point)["default"]
    assert symm_mem.layer_slots(config, space.OPERATORS) == symm_mem.ASYNC_TP
    assert set(symm_mem.layer_slots(config, ["fc1", "fc2"])) == {"fc1_fprop", "fc1_dgrad", "fc2_fprop", "fc2_dgrad"}


def switched(**switches: bool) -> dict[str, bool]:
    return {**SWITCH_DEFAULTS, **{f"tp_comm_{name}": on for name, on in switches.items()}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OverlapConfig({}, switched(overlap=False)), {}),
        (
            OverlapConfig({}, switched(overlap_ag=False, bulk_dgrad=False)),
            {"proj_fprop": "ring_exchange", "fc2_fprop": "ring_exchange"},
        ),
        (
            OverlapConfig({"fc1_dgrad": BULK, "fc1_wgrad": BULK}, switched(overlap_ag=False, overlap_rs=False)),
            {"qkv_dgrad": "ring_exchange", "fc1_dgrad": "bulk", "fc1_wgrad": "bulk"},
        ),
        (
            OverlapConfig({"fc1_fprop": RING}, switched(overlap_rs=False, bulk_dgrad=False)),
            dict.fromkeys(("fc1_fprop", "qkv_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange"),
        ),
    ],
)
def test_switches_turn_off_what_they_turn_off_in_megatron(config: OverlapConfig, expected: dict[str, str]) -> None:
    assert {slot: s["method"] for slot, s in symm_mem.layer_slots(config, space.OPERATORS).items()} == expected
