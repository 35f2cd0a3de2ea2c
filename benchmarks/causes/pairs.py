"""Pairs of programs that differ in one thing, for `record_pairs.py`: other models and sizes than those that `predict`
was made on.

Arithmetic for two H200s as in `data_parallel.py` and `sharded.py`: under the profiler FSDP2's host needs 4 to 5 ms for
each unit and step, so units are few and large. On a CPU steps are of 20 to 150 ms.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from causes.data_parallel import SHAPES, accumulated, more_products, summed_by_hand
from causes.host import watched
from causes.scenario import Attention, Block, Job, Scenario, Sizes, Step, adam, blocks, ddp, training
from causes.sharded import fsdp2
from causes.tensor_parallel import Experts, parallel_blocks

Make = Callable[..., Step]
# 12 hidden^2 parameters a layer: 0.4 GB in 1.3 ms beside 7.6 ms of computation.
TRANSFORMER = Sizes(4096, 4096, 2), Sizes(256, 256, 3)
BY_HAND = Sizes(5120, 4096, 3), Sizes(320, 256, 3)
ACCUMULATED = Sizes(6144, 1024, 2), Sizes(384, 64, 3)
SHARDED = Sizes(6144, 4096, 3), Sizes(320, 256, 3)
# 1.7 GB of a layer are gathered in 3.2 ms, twice, beside 4 ms of computation.
FEW_TOKENS = Sizes(10240, 512, 3), Sizes(384, 48, 3)
SPLIT = Sizes(8192, 4096, 2), Sizes(256, 256, 3)
EXPERTS = Sizes(4096, 8192, 2), Sizes(256, 256, 3)
READ = Sizes(5120, 4096, 3), Sizes(256, 256, 3)
CONNECTIONS = [{"CUDA_DEVICE_MAX_CONNECTIONS": count} for count in ("1", "8")]


@dataclass(frozen=True)
class Pair:
    before: Scenario
    after: Scenario
    change: str
    """Name and value of the change, as `predict` takes it."""
    back: str = ""
    """The change from `after` to `before`, if it has a name."""


def pairs_of(device: str) -> list[Pair]:
    found: list[Pair] = []
    cuda = device == "cuda"
    # On a GPU sizes are known without shapes, which cost the host time.
    fixed: dict[str, Any] = {"active_steps": 8, "profiler": {} if cuda else SHAPES, "devices": (device,)}

    def add(name: str, make: Make, before: dict[str, Any], after: dict[str, Any], change: str, back: str = "") -> None:
        makes = [partial(make, **own) for own in (before, after)]
        environments = CONNECTIONS if "CONNECTIONS" in change else [{}, {}]
        one, other = (
            Scenario(own, "", (), "", program, environment=environment, **fixed)
            for own, program, environment in zip((name, f"{name}_changed"), makes, environments, strict=True)
        )
        found.append(Pair(one, other, change, back))

    small, medium, large = (10, 50, 400) if cuda else (0.5, 1, 4)
    bucket, one = "ddp.bucket_cap_mb=", {"mb": 10_000}
    add("ddp_buckets", ddp_transformer, {"mb": small}, {"mb": large}, f"{bucket}{large}", f"{bucket}{small}")
    add("ddp_one_bucket", ddp_funnel, one, {"mb": medium}, f"{bucket}{medium}", f"{bucket}10000")
    even = {"mb": medium, "counts": (4, 4)}
    add("ddp_late_one_bucket", ddp_funnel, one | {"counts": (0, 8)}, even, f"{bucket}{medium}+ranks.equal=true")
    add("ddp_accumulates", ddp_twice, {"once": False}, {"once": True}, "ddp.no_sync=true")
    by_hand = partial(summed_by_hand, chosen=BY_HAND)
    add("sums_in_a_loop", by_hand, {"when": "after_backward"}, {"when": "in_hooks_async"}, "ddp.hooks=true")
    add("ddp_host_late", ddp_waiting, {"parts": (0, 1)}, {"parts": (0.5, 0.5)}, "ranks.equal=true")
    add("loader_late", loaded, {"is_late": True}, {"is_late": False}, "loader.ready=true")

    kept, ahead = "fsdp2.reshard_after_forward=false", {"ahead": 1}
    few = {"ahead": 1, "chosen": FEW_TOKENS}
    add("fsdp2_on_demand", sharded, {"ahead": 0}, ahead, "fsdp2.prefetch=1")
    add("fsdp2_one_ahead", sharded, ahead, {"ahead": 2}, "fsdp2.prefetch=2")
    add("fsdp2_few_tokens", sharded, few, few | {"reshard": False}, kept)
    add("fsdp2_both", sharded, {"ahead": 0}, {"ahead": 1, "reshard": False}, f"fsdp2.prefetch=1+{kept}")
    add("fsdp2_accumulates", sharded, few | {"once": False}, few | {"once": True}, "fsdp2.no_sync=true")
    add("fsdp2_unequal", sharded, ahead | {"counts": (6, 0)}, ahead | {"counts": (3, 3)}, "ranks.equal=true")

    add("tp_batch", split, {}, {"times": 2}, "batch.times=2")
    add("tp_unequal", split, {"counts": (0, 8)}, {"counts": (4, 4)}, "ranks.equal=true")
    add("moe_unequal", mixture, {"popularity": 0.7}, {}, "ranks.equal=true")
    add("moe_batch", mixture, {}, {"times": 2}, "batch.times=2")
    if cuda:
        queues = "env.CUDA_DEVICE_MAX_CONNECTIONS=8", "env.CUDA_DEVICE_MAX_CONNECTIONS=1"
        add("tp_sync", split, {"waits": True}, {}, "host.sync=none")
        add("ddp_item", ddp_read, {"reads": True}, {"reads": False}, "host.sync=none")
        add("fsdp2_item", sharded, ahead | {"reads": True}, ahead | {"reads": False}, "host.sync=none")
        add("ddp_ctas", ddp_of_ctas, {"ctas": 32}, {"ctas": 4}, "nccl.max_ctas=4")
        add("fsdp2_connections", sharded, ahead, ahead, *queues)
        add("tp_dp_connections", split, {"data_parallel": True}, {"data_parallel": True}, *queues)
    return found


def transformer(job: Job, sizes: Sizes, inner: Callable[..., nn.Module] = Block) -> nn.Sequential:
    """Returns attention layers, each with an inner module after it."""
    length = 2048 if job.on_gpu else 128
    layers = (
        nn.Sequential(Attention(job, sizes.hidden, length), inner(job, sizes.hidden)) for _ in range(sizes.layers)
    )
    return nn.Sequential(*layers)


def ddp_transformer(job: Job, mb: float) -> Step:
    sizes = job.sizes(*TRANSFORMER)
    return training(ddp(job, transformer(job, sizes), mb), job.random(sizes.tokens, sizes.hidden))


def ddp_funnel(job: Job, mb: float, counts: tuple[int, int] = (0, 0)) -> Step:
    """DDP of layers whose gradients differ in size; between forward and backward each rank multiplies so many more."""
    # 0.54 GB take 1.8 ms, forward and backward 10 ms.
    widths = (8192, 16384, 4096, 8192, 4096) if job.on_gpu else (512, 1024, 256, 1024, 256)
    layers = nn.Sequential(*(nn.Sequential(job.linear(*both), nn.GELU()) for both in pairwise(widths)))
    x = job.random(4096 if job.on_gpu else 384, widths[0])
    return training(ddp(job, layers, mb), x, before_backward=more(job, counts))


def more(job: Job, counts: tuple[int, int]) -> Step:
    return more_products(job, counts, *((4096, 8192) if job.on_gpu else (512, 256)))


def ddp_twice(job: Job, *, once: bool) -> Step:
    return accumulated(job, job.sizes(*ACCUMULATED), 2, reduced_once=once)


def ddp_waiting(job: Job, parts: tuple[float, float]) -> Step:
    """DDP whose hosts sleep a part of 20 ms, on a CPU 30, before the backward pass."""
    sizes, seconds = job.sizes(*TRANSFORMER), 0.02 if job.on_gpu else 0.03
    own = seconds * parts[job.rank == job.ranks - 1]
    x = job.random(sizes.tokens, sizes.hidden)
    return training(ddp(job, transformer(job, sizes)), x, before_backward=lambda: time.sleep(own))


class Batches(IterableDataset[Tensor]):
    """Yields the same batch again and again, each after some seconds."""

    def __init__(self, batch: Tensor, seconds: float) -> None:
        self.batch, self.seconds = batch, seconds

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            time.sleep(self.seconds)
            yield self.batch


def loaded(job: Job, *, is_late: bool) -> Step:
    """DDP whose DataLoader makes a batch in 25 ms, longer than a GPU needs for a step; on a CPU in 40."""
    sizes, seconds = job.sizes(*TRANSFORMER), (0.025 if job.on_gpu else 0.04) * is_late
    batch = job.random(sizes.tokens, sizes.hidden).cpu()
    batches = iter(DataLoader(Batches(batch.pin_memory() if job.on_gpu else batch, seconds), batch_size=None))
    model = ddp(job, transformer(job, sizes))
    optimizer = adam(model)

    def step() -> None:
        model(next(batches).to(job.device, non_blocking=True)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(
    job: Job,
    ahead: int,
    chosen: tuple[Sizes, Sizes] = SHARDED,
    reshard: bool = True,
    once: bool | None = None,
    counts: tuple[int, int] = (0, 0),
    reads: bool | None = None,
) -> Step:
    """FSDP2 that gathers `ahead` layers ahead, forward and backward. `once`: with two microbatches, whether gradients
    are reduced after the second alone; `reads`: whether the host reads the largest value of each layer's output."""
    sizes = job.sizes(*chosen)
    x = job.random(sizes.tokens, sizes.hidden)
    layers = blocks(job, sizes) if reads is None else watched(job, sizes, largest(reads), backward=False)
    model = fsdp2(job, layers, prefetch=ahead > 0, reshard=reshard)
    for i, layer in enumerate(layers if ahead else ()):
        layer.set_modules_to_forward_prefetch([*layers[i + 1 : i + 1 + ahead]])
        layer.set_modules_to_backward_prefetch([*layers[max(0, i - ahead) : i]][::-1])
    if once is None:
        return training(model, x, before_backward=more(job, counts))
    optimizer = adam(model)

    def step() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last or not once)
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def largest(reads: bool) -> Callable[[Tensor], None]:
    def look(x: Tensor) -> None:
        value = x.abs().max()
        if reads:
            value.item()

    return look


def split(
    job: Job, times: int = 1, counts: tuple[int, int] = (0, 0), waits: bool = False, data_parallel: bool = False
) -> Step:
    """Tensor parallelism by hand. `times`: of the batch; `waits`: whether the host waits for forward."""
    sizes = job.sizes(*SPLIT)
    model: nn.Module = parallel_blocks(job, sizes)
    multiply = more(job, counts)

    def before_backward() -> None:
        multiply()
        if waits:
            job.module.synchronize()

    x = job.random(times * sizes.tokens, sizes.hidden)
    return training(ddp(job, model) if data_parallel else model, x, before_backward=before_backward)


def mixture(job: Job, popularity: float = 0.5, times: int = 1) -> Step:
    """Mixture of experts with attention before each."""
    hidden, tokens, layers = job.sizes(*EXPERTS)
    sizes = Sizes(hidden, times * tokens, layers)
    model = transformer(job, sizes, lambda job, _: Experts(job, sizes, popularity))
    return training(model, job.random(sizes.tokens, hidden))


def ddp_read(job: Job, *, reads: bool) -> Step:
    """DDP where `.item()` reads the largest value of each layer's output, and backward of its gradient."""
    sizes = job.sizes(*READ)
    return training(ddp(job, watched(job, sizes, largest(reads))), job.random(sizes.tokens, sizes.hidden))


def ddp_of_ctas(job: Job, ctas: int) -> Step:
    """DDP whose collectives have so many thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
    sizes, group = job.sizes(*READ), dist.new_group(pg_options=options)
    model = DistributedDataParallel(blocks(job, sizes), process_group=group, gradient_as_bucket_view=True)
    return training(model, job.random(sizes.tokens, sizes.hidden))
