"""Records small traces of other programs' overlap, on two GPUs:

    torchrun --nproc-per-node 2 benchmarks/record_gpu_traces.py DIR [CASE...]

Rank r writes DIR/<case>_rank<r>.json.gz, and rank 0 DIR/<case>.expected.json: the number of matrix products in
each pass of an iteration, counted by PyTorch's dispatcher and not from the trace. NVLink multicast stays off.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

HIDDEN, FFN, TOKENS, LAYERS, STEPS, WARMUP = 2048, 8192, 2048, 2, 2, 3
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, -1, 16, HIDDEN // 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.proj(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)[0]
        )
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointed else layer(x)
        return x


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def new_input() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def training(model: nn.Module, parameters: Any, counts: Counter[str]) -> Step:
    optimizer, x = torch.optim.AdamW(parameters, lr=1e-4), new_input()

    def step() -> None:
        with Counting() as forward:
            loss = model(x).float().square().mean()
        with Counting() as backward:
            loss.backward()
        counts.update(fwd=forward.count, bwd=backward.count)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(counts: Counter[str]) -> Step:
    model = nn.parallel.DistributedDataParallel(Model().cuda().bfloat16(), bucket_cap_mb=40)
    return training(model, model.parameters(), counts)


def fsdp2_checkpoint(counts: Counter[str]) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = Model(checkpointed=True).cuda().bfloat16()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return training(model, model.parameters(), counts)


def reentrant_checkpoint(counts: Counter[str]) -> Step:
    model = Model(checkpointed=True, reentrant=True).cuda().bfloat16()
    return training(model, model.parameters(), counts)


def compiled(counts: Counter[str]) -> Step:
    model = torch.compile(Model().cuda().bfloat16())
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-4), new_input()

    def step() -> None:
        model(x).float().square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        # No dispatcher sees what the compiler made of it.
        counts.update(fwd=4 * LAYERS, bwd=8 * LAYERS)

    return step


def cuda_graph(counts: Counter[str]) -> Step:
    """Forward and backward of a column- and a row-parallel linear, with their collectives, in one graph."""
    ranks = dist.get_world_size()
    x = torch.randn(TOKENS // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w1 = torch.randn(FFN // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(HIDDEN, FFN // ranks, device="cuda", dtype=torch.bfloat16)
    gathered = torch.empty(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scattered = torch.empty_like(x)

    def work() -> None:
        dist.all_gather_into_tensor(gathered, x)
        hidden = functional.gelu(gathered @ w1.t())
        dist.reduce_scatter_tensor(scattered, hidden @ w2.t())

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def step() -> None:
        graph.replay()
        counts.update(all=2)

    return step


def symm_mem(counts: Counter[str]) -> Step:
    """PyTorch's fused all-gather + matmul and matmul + reduce-scatter."""
    # Defines the operators.
    import torch.distributed._symmetric_memory

    group = dist.group.WORLD
    assert group
    ranks = dist.get_world_size()
    x = torch.randn(TOKENS // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w1 = torch.randn(HIDDEN, FFN // ranks, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(FFN // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        ops = torch.ops.symm_mem
        _, (hidden,) = ops.fused_all_gather_matmul(x, [w1], 0, group.group_name)
        ops.fused_matmul_reduce_scatter(functional.gelu(hidden), w2, "sum", 0, group.group_name)
        # In one piece for each rank's part, or in smaller ones.
        counts.update(at_least=2 * ranks)

    return step


def send_recv(counts: Counter[str]) -> Step:
    """A ring exchange by hand: chunks travel while what is there is multiplied."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(FFN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(x)

    def step() -> None:
        sent = dist.P2POp(dist.isend, x, (rank + 1) % ranks)
        received = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        works = dist.batch_isend_irecv([sent, received])
        x @ w.t()
        for work in works:
            work.wait()
        other @ w.t()
        counts.update(fwd=2)

    return step


def record(name: str, make: Callable[[Counter[str]], Step], directory: Path, **options: Any) -> None:
    counts: Counter[str] = Counter()
    step = make(counts)
    for _ in range(WARMUP):
        step()
    counted = {phase: count // WARMUP for phase, count in counts.items()}
    torch.cuda.synchronize()
    dist.barrier()
    path = directory / f"{name}_rank{dist.get_rank()}.json.gz"
    stepped = name not in ("cuda_graph", "reentrant_checkpoint")
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1) if stepped else None
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=plan, **options) as profiler:
        for _ in range(STEPS + 1):
            step()
            torch.cuda.synchronize()
            if stepped:
                profiler.step()
    profiler.export_chrome_trace(str(path))
    if dist.get_rank() == 0:
        (directory / f"{name}.expected.json").write_text(json.dumps(counted) + "\n")
    torch.cuda.synchronize()
    dist.barrier()


CASES = {
    case.__name__: case
    for case in (ddp, fsdp2_checkpoint, reentrant_checkpoint, compiled, cuda_graph, symm_mem, send_recv)
}


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    directory.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for name in names:
        try:
            record(name, CASES[name], directory)
        except Exception as error:
            # The others are still wanted.
            print(f"rank {dist.get_rank()}: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
