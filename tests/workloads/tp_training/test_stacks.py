"""Every stack, cut over ranks in every way, trains what the whole Hugging Face model does in one process."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.tp_training import autotp, run
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, Architecture
from overlap_sweep.workloads.tp_training.run import groups_of, initial_weights, token_batches
from tests.composed import tp_point
from tests.processes import run_ranks
from tests.workloads.tp_training.stacks import (
    ASYNC_TP,
    CASES,
    FUSED,
    HALF,
    MESHES,
    RANKS,
    Case,
    Trained,
    config_point,
    differences,
    make_do,
    point_of,
    train_points,
    trained,
)

pytestmark = pytest.mark.end_to_end

WITHIN = {"autotp": (1e-4, 1e-4), "fsdp_dtensor": (1e-6, 2e-5), "async_tp": (1e-6, 2e-5), "megatron": (1e-4, 1e-4)}
HALF_WITHIN = {"autotp": (3e-4, 1e-2), "fsdp_dtensor": (2e-3, 0.02), "megatron": (2e-3, 5e-2)}
"""Relative, of losses and of norms: what is wrong in the norm or the loss scale is wrong by more."""


def of_case(case: Case) -> list[Trained]:
    """By rank."""
    return [of_rank[str(case)] for of_rank in trained(case.stack, RANKS[case.mesh])]


@pytest.mark.parametrize("case", CASES + HALF, ids=str)
def test_losses_and_norms_are_those_of_one_process(case: Case) -> None:
    of_losses, of_norms = differences(of_case(case), point_of(case))
    most_of_losses, most_of_norms = (HALF_WITHIN if case in HALF else WITHIN)[case.stack]
    assert of_losses < most_of_losses
    assert of_norms < most_of_norms
    # In lower precisions they are neither the same as in float32, nor anything else.
    assert case not in HALF or of_losses > 1e-7


@pytest.mark.parametrize("case", ASYNC_TP, ids=str)
def test_async_tp_fuses_what_can_be_fused(case: Case) -> None:
    point = point_of(case)
    training, layers = point.tp_training, point.language_model["num_hidden_layers"]
    passes = layers * training.gradient_accumulation_steps * training.num_training_steps
    # Queries, keys and values with a bias are none of the GEMMs that are fused.
    biased, again = int(case.name.startswith("qwen2")), int(training.activation_checkpointing)
    for found in of_case(case):
        # Of the inputs of attention and MLP forward, and of the gradients of their outputs. All layers share them.
        assert found.details["compiled_graphs"] == 2
        assert (found.details[FUSED[0]], found.details["all_gather_into_tensor"]) == (4 - biased, biased)
        # A sum of several GEMMs' products is no GEMM's.
        assert (found.details[FUSED[1]], found.details["reduce_scatter_tensor"]) == (2, 2)
        assert found.warnings == []
        called = found.details["called"]
        assert called.count(FUSED[0]) == passes * (4 - biased + (2 - biased) * again)
        # The last one of the forward is not needed again.
        assert called.count(FUSED[1]) in (passes * (2 + again), passes * (2 + 2 * again))


def test_megatron_says_what_was_run() -> None:
    found = trained("megatron", 2)[0]
    alone, replicated = (found[f"megatron, {mesh}, in sequence, accumulated"].details for mesh in ("tp2", "dp2"))
    reduced, late, at_once = (
        found[f"megatron, dp2, {name}"].details for name in ("all-reduced", "reduced at the end", "gathered at once")
    )
    assert alone["tp_comm_overlap"] == replicated["tp_comm_overlap"] == "off"
    said = ("optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert [alone[name] for name in said] == ["not distributed", False, False]
    assert [replicated[name] for name in said] == ["distributed", True, True]
    assert [reduced[name] for name in said] == ["not distributed", True, False]
    assert [late[name] for name in said] == ["distributed", False, False]
    assert [at_once[name] for name in said] == ["distributed", True, False]
    # Buckets are for what is reduced during the backward.
    assert alone["buckets"] == replicated["buckets"] == late["buckets"] == 1
    assert min(reduced["buckets"], at_once["buckets"]) > 2


def _schedule(ranks: Ranks, points: list[Resolved]) -> list[Any]:
    """What each point's library was told of its data parallelism: DeepSpeed's optimizer of overlap and buckets; FSDP2
    by layer of resharding and of how many it gathers ahead in forward and backward."""
    found: list[Any] = []
    for point in points:
        make_do(point.impl, ranks)
        built: Any = run.load(point.impl)(point, ranks, groups_of(ranks, point.tp_size, point.dp_size))
        if point.impl == "autotp":
            theirs = built._engine.optimizer
            found.append((theirs.overlap_comm, theirs.reduce_bucket_size, theirs.allgather_bucket_size))
        else:
            states = [layer._get_fsdp_state() for layer in built._model.model.layers]
            ahead = [
                (len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)) for state in states
            ]
            reshards = {state._fsdp_param_group.post_forward_mesh_info is not None for state in states}
            found.append((ahead, reshards))
        built.close()
    return found


def test_libraries_are_told_how_data_parallel_ranks_communicate() -> None:
    def scheduled(impl: str, *given: tuple[str, ...]) -> list[Any]:
        same = (f"impl={impl}", *MESHES["dp2"], "model.num_layers=3")
        points = [tp_point(*same, *(f"tp_training.{option}" for option in options)) for options in given]
        first, second = run_ranks(2, _schedule, points, keep=impl)
        assert first == second
        return first

    assert scheduled("autotp", (), ("overlap_comm=true", "reduce_bucket_size=100", "allgather_bucket_size=200")) == [
        (False, 500_000_000, 500_000_000),
        (True, 100, 200),
    ]
    kept, ahead, off = (
        ("reshard_after_forward=false",),
        ("forward_prefetch=2", "backward_prefetch=2"),
        ("backward_prefetch=0",),
    )
    # After the last layer there is the root. A list with the layer itself replaces FSDP2's own prefetching.
    assert scheduled("fsdp_dtensor", (), kept, ahead, off) == [
        ([(0, 0)] * 3, {True}),
        ([(0, 0)] * 3, {False}),
        ([(2, 1), (2, 1), (1, 2)], {True}),
        ([(0, 1)] * 3, {True}),
    ]


GRANITE = Architecture(more={"embedding_multiplier": 3.0, "logits_scaling": 0.5})


def _train_with_granite(ranks: Ranks, points: dict[str, Resolved]) -> dict[str, Trained]:
    with patch.dict(ARCHITECTURES, granite=GRANITE):
        return train_points(ranks, points)


@pytest.mark.parametrize("stack", ["autotp", "fsdp_dtensor"])
def test_a_new_architecture_is_a_new_line_and_a_config_is_trained_with_all_that_it_says(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "granite", GRANITE)
    granite, llama = (tp_point(f"impl={stack}", f"model.architecture={name}") for name in ("granite", "llama"))
    config = config_point(tmp_path, f"impl={stack}", "tp_training.learning_rate=0.01")
    found = run_ranks(2, _train_with_granite, {"granite": granite, "config": config}, keep=stack)
    of_granite, of_config = ([of_rank[name] for of_rank in found] for name in ("granite", "config"))
    assert granite["language_model"]["embedding_multiplier"] == 3.0
    assert max(differences(of_granite, granite)) < 1e-4
    assert differences(of_granite, llama)[0] > 1e-3
    of_losses, of_norms = differences(of_config, config)
    assert of_losses < 1e-4
    assert of_norms < 1e-3


OVERFLOWING = {
    **{f"autotp, zero{stage}": ("impl=autotp", f"tp_training.zero_stage={stage}") for stage in (1, 2)},
    "fsdp_dtensor": ("impl=fsdp_dtensor",),
    "megatron": ("impl=megatron",),
}


def _overflow(ranks: Ranks, point: Resolved) -> list[tuple[float, float, float]]:
    """By step the loss of one batch, the norm and the loss scale after it, where gradients of the second step are
    infinite: with Megatron-Core all, otherwise one of one rank."""
    groups, impl = groups_of(ranks, point.tp_size, point.dp_size), point.impl
    make_do(impl, ranks)
    built, found = run.load(impl)(point, ranks, groups), []
    batch = token_batches(point, ranks, groups.dp_rank)[0]
    for step in range(3):
        spoiled = step == 1 and ranks.rank == 1
        loss = built.forward(*batch, True)
        if impl == "autotp":
            weight = built._engine.module.model.layers[0].mlp.up_proj.weight
            hook = weight.register_hook(lambda gradient, spoiled=spoiled: gradient / (0.0 if spoiled else 1.0))
        built.backward(loss * torch.inf if impl == "megatron" and step == 1 else loss, True)
        if impl == "autotp":
            hook.remove()
        if impl == "fsdp_dtensor" and spoiled:
            list(built._model.parameters())[3].grad.to_local().view(-1)[0] = torch.inf
        norm = built.update().item()
        found.append((loss.item(), norm, SCALE[impl](built)))
    built.close()
    return found


SCALE: dict[str, Callable[[Any], float]] = {
    "autotp": lambda built: 2.0**16,
    "fsdp_dtensor": lambda built: built._scaler.get_scale(),
    "megatron": lambda built: built._optimizer.get_loss_scale().item(),
}
"""DeepSpeed's is not looked at."""


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_step_with_infinite_gradients_is_left_out_on_all_ranks(name: str) -> None:
    point = tp_point("tp_training.dtype=float16", *OVERFLOWING[name])
    for first, second, third in run_ranks(2, _overflow, point, keep=point.impl):
        assert [math.isfinite(norm) for _, norm, _ in (first, second, third)] == [True, False, True]
        # No step was taken between them.
        assert first[0] > second[0] == third[0]
        if point.impl != "autotp":
            assert [scale for *_, scale in (first, second, third)] == [2**16, 2**15, 2**15]


def _masters_of_autotp(ranks: Ranks, points: list[Resolved]) -> list[float]:
    """The largest difference of the float32 weights from the drawn ones, before the first step."""
    from deepspeed.utils import safe_get_full_fp32_param

    differ = []
    for point in points:
        built = autotp.AutoTp(point, ranks, groups_of(ranks, point.tp_size, point.dp_size))
        draw = initial_weights(point, ranks)
        parameters = dict(built._engine.module.named_parameters())
        unfused = dict(autotp._own_masters(built._engine.optimizer))
        for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            parameter, dimension = parameters[name], int("o_proj" in name)
            shape = list(parameter.shape)
            shape[dimension] *= 2
            expected = draw(name, shape).chunk(2, dimension)[ranks.rank]
            master = unfused[parameter] if unfused else safe_get_full_fp32_param(parameter)
            assert torch.equal(parameter, expected.bfloat16())
            differ.append((master - expected).abs().max().item())
        built.close()
    return differ


def test_master_weights_of_autotp_are_drawn_in_float32() -> None:
    points = [
        tp_point("impl=autotp", "tp_training.dtype=bfloat16", f"tp_training.zero_stage={stage}") for stage in (0, 1, 2)
    ]
    assert run_ranks(2, _masters_of_autotp, points, keep="autotp") == [[0.0] * 6] * 2


def _left_behind(ranks: Ranks, point: Resolved) -> int:
    """How many parameters are still there when their model is closed."""
    groups = groups_of(ranks, point.tp_size, point.dp_size)
    built = autotp.AutoTp(point, ranks, groups)
    built.backward(built.forward(*token_batches(point, ranks, groups.dp_rank)[0], True), True)
    built.update()
    parameters = [weakref.ref(parameter) for parameter in built._engine.module.parameters()]
    built.close()
    del built
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


def test_no_parameter_of_autotp_outlives_its_model() -> None:
    assert run_ranks(2, _left_behind, tp_point("impl=autotp", "tp_training.zero_stage=2"), keep="autotp") == [0, 0]


def _masters_of_megatron(ranks: Ranks, point: Resolved) -> tuple[list[float], int, int]:
    """What this rank's optimizer keeps of the embedding of a model in bfloat16, and how many process groups there are
    after one model and after two."""
    from overlap_sweep.workloads.tp_training import megatron

    make_do("megatron", ranks)
    groups = groups_of(ranks, point.tp_size, point.dp_size)
    built = megatron.Megatron(point, ranks, groups)
    embedding = dict(built._model.module.module.named_parameters())["embedding.word_embeddings.weight"]
    # A data-parallel rank may own nothing of it.
    kept = [] if embedding.main_param is None else embedding.main_param.detach().flatten().tolist()
    built.close()
    made = len(dist.distributed_c10d._world.pg_map)
    megatron.Megatron(point, ranks, groups).close()
    return kept, made, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_master_weights_of_megatron_are_drawn_in_float32_and_groups_are_made_once(mesh: str) -> None:
    point = tp_point("impl=megatron", "tp_training.dtype=bfloat16", *MESHES[mesh])
    whole = initial_weights(point, Ranks(0, 1, torch.device("cpu")))("model.embed_tokens.weight", (1024, 64))
    found = run_ranks(2, _masters_of_megatron, point, keep="megatron")
    assert [value for kept, *_ in found for value in kept] == whole.flatten().tolist()
    assert all(made == made_again for _, made, made_again in found)
