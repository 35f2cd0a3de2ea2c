"""Records small trainings twice, with and without a setting, some of which are known to do nothing:

    python benchmarks/record_effects.py OUT [--device cpu] [--nproc 2] [--only PATTERN,...]

It starts torchrun once for each environment. OUT/<name>/ has each rank's trace_rank<r>.json.gz and recorded.json with
program, options, environment and versions. tests/effects/test_planted.py says what was planted between two of them.
Nothing of overlap_sweep is imported. On a CPU only what has a meaning there is recorded.
"""

import os

# Before NCCL or PyTorch start: NVLink multicast stays off, also in what is started from here.
os.environ.update(UB_SKIPMC="1", NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import framework_programs
import torch
import torch.distributed as dist
from effects_recordings import RECORDINGS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

Step = Callable[[], None]
WARM_UP_STEPS, RECORDED_STEPS = 3, 4
STALLED_AFTER_S = 600


class Block(nn.Module):
    """Two linear layers with a norm: 8 hidden^2 parameters."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Training:
    """Device, sizes, model, data and step that every program shares."""

    def __init__(self, device: torch.device):
        self.device = device
        self.hidden, self.tokens, self.layers = (1024, 8192, 5) if device.type == "cuda" else (256, 64, 4)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def blocks(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Block(self.hidden) for _ in range(self.layers)]).to(self.device, self.dtype)

    def batch(self) -> Tensor:
        return torch.randn(self.tokens, self.hidden, device=self.device, dtype=self.dtype)

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Callable[[], None] | None = None
    ) -> Step:
        x = self.batch()

        def one() -> None:
            model(x).float().square().mean().backward()

        def step() -> None:
            (micro_batches or one)()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step


def ddp(
    training: Training,
    *,
    compiled: bool = False,
    no_sync: bool | None = None,
    optimizer: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
    compressed: bool = False,
    first_bucket: bool = True,
    high_priority: bool = False,
    **options: Any,
) -> Step:
    """DistributedDataParallel; `no_sync` accumulates two micro-batches, with or without it."""
    process_group = None
    if group is not None or high_priority:
        chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
        for name, value in (group or {}).items():
            setattr(chosen.config, name, value)
        process_group = dist.new_group(pg_options=chosen)
    model: nn.Module = training.blocks()
    wrapped = DistributedDataParallel(model, process_group=process_group, **options)
    if compressed:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(process_group, fp16_compress_hook)
    runs: nn.Module = torch.compile(wrapped) if compiled else wrapped
    chosen_optimizer = torch.optim.AdamW(model.parameters(), **(optimizer or {}))
    if no_sync is None:
        return training.step(runs, chosen_optimizer)
    x = training.batch()

    def micro_batches() -> None:
        with wrapped.no_sync() if no_sync else nullcontext():
            runs(x).float().square().mean().backward()
        runs(x).float().square().mean().backward()

    return training.step(runs, chosen_optimizer, micro_batches)


def _gather_and_scatter(device: torch.device) -> tuple[Any, Any]:
    """Returns an all-gather and a reduce-scatter of FSDP2 whose buffers are in symmetric memory, two of each size."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    dist.barrier()
    backend: Any = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=True)
    buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(size).numel()
        # NCCL 2.28 gathers others wrongly.
        if count * dtype.itemsize % (16 * dist.get_world_size()):
            return torch.empty(count, dtype=dtype, device=device)
        of_size = buffers.setdefault((count, dtype), [])
        if len(of_size) < 2:
            with torch.cuda.use_mem_pool(pool):
                # Large ones have a segment of their own, the same on each rank.
                of_size.insert(0, torch.empty(max(count, 16 << 20), dtype=dtype, device=device))
        else:
            of_size.reverse()
        return of_size[0][:count]

    class Gather(AllGather):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return allocate(size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> Any:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    class Scatter(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return allocate(size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
        ) -> Any:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

    return Gather(), Scatter()


def fsdp2(
    training: Training,
    *,
    reshard: bool = True,
    forward_prefetch: int = 0,
    backward_prefetch: int = 0,
    reduce_dtype: str | None = None,
    accumulate: bool | None = None,
    own_reduce_scatter: bool = False,
    symm_mem: bool = False,
    allocate_from_group: bool = False,
    unshard_async: bool = False,
    root_only: bool = False,
) -> Step:
    """FSDP2, one unit a block."""
    model = training.blocks()
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce_dtype)) if reduce_dtype else MixedPrecisionPolicy()
    units = [] if root_only else list(model)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    if forward_prefetch:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + forward_prefetch])
    if backward_prefetch:
        for i, unit in enumerate(units):
            unit.set_modules_to_backward_prefetch(units[max(0, i - backward_prefetch) : i][::-1])
    if own_reduce_scatter:
        model.set_separate_reduce_scatter_group() if hasattr(model, "set_separate_reduce_scatter_group") else None
    if symm_mem:
        gather, scatter = _gather_and_scatter(training.device)
        for unit in (*units, model):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
            # Its kernels know no averages.
            unit.set_force_sum_reduction_for_comms(True)
    if allocate_from_group:
        for unit in (*units, model):
            unit.set_allocate_memory_from_process_group_for_comm(True)
    if unshard_async:
        model._set_unshard_async_op(True)
    optimizer = torch.optim.AdamW(model.parameters())
    if accumulate is None:
        return training.step(model, optimizer)
    x = training.batch()

    def micro_batches() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last or not accumulate)
            model(x).float().square().mean().backward()

    return training.step(model, optimizer, micro_batches)


PROGRAMS: dict[str, Callable[..., Step]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{
        name: getattr(framework_programs, name)
        for name in ("megatron", "deepspeed", "tensor_parallel", "captured", "userbuffers")
    },
}


def on_cpu(name: str) -> bool:
    """Returns whether the recording has a meaning without GPUs."""
    program, options, environment = RECORDINGS[name]
    of_nccl = {"group", "high_priority", "compiled", "own_reduce_scatter"} & {*options}
    if program == "deepspeed":
        return True
    return program in ("ddp", "fsdp2") and not of_nccl and environment.keys() <= {"NCCL_MAXCTAS"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else ["*"]
    names = [
        name
        for name in RECORDINGS
        if any(fnmatch(name, one) for one in wanted) and (given.device == "cuda" or on_cpu(name))
    ]
    if "LOCAL_RANK" in os.environ:
        record_here(given.out, given.device, names)
        return 0
    by_environment: dict[str, list[str]] = {}
    for name in names:
        by_environment.setdefault(json.dumps(RECORDINGS[name][2], sort_keys=True), []).append(name)
    given.out.mkdir(parents=True, exist_ok=True)
    for environment, together in by_environment.items():
        started = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(given.nproc),
            __file__,
            str(given.out),
            "--device",
            given.device,
            "--only",
            ",".join(together),
        ]
        clean = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
        limit_s = STALLED_AFTER_S
        try:
            done = subprocess.run(
                command, env=clean | json.loads(environment), timeout=limit_s, capture_output=True, text=True
            )
            log, rc = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            log, rc = str(error.stderr or b""), 124
        (given.out / f"log_{together[0]}.txt").write_text(log)
        lines = [line for line in log.splitlines() if line.startswith("failed") or line.startswith("ok")]
        print(
            environment,
            f"rc {rc} in {time.monotonic() - started:.0f} s;",
            f"{sum(line.startswith('ok') for line in lines)} ok",
            *[line[:150] for line in lines if line.startswith("failed")],
            sep="\n  ",
            flush=True,
        )
    return 0


def record_here(out: Path, device_type: str, names: list[str]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    for name in names:
        try:
            step_ms = record(name, Training(device), out / name, rank)
            if rank == 0:
                print(f"ok {name} {step_ms:.2f} ms", flush=True)
        except Exception as error:
            print(f"failed {name} on rank {rank}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        if RECORDINGS[name][0] == "userbuffers" and RECORDINGS[name][1].get("overlap", True):
            framework_programs.userbuffers_off()
        gc.collect()
        if device_type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def record(name: str, training: Training, directory: Path, rank: int) -> float:
    """Records one training on this rank. Returns the mean of its steps without the profiler in ms."""
    program, options, environment = RECORDINGS[name]
    directory.mkdir(parents=True, exist_ok=True)
    options = dict(options)
    # Without ProfilerStep: steps are found from what repeats.
    unmarked = options.pop("unmarked", False)
    step = PROGRAMS[program](training, **options)
    on_gpu = training.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)
    for _ in range(WARM_UP_STEPS):
        step()
    synchronize()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(10):
        step()
    synchronize()
    took_ms = (time.perf_counter() - started) * 100
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    path = directory / f"trace_rank{rank}.json.gz"
    with profile(
        activities=activities,
        # Without a GPU sizes of collectives are known from shapes alone.
        record_shapes=not on_gpu,
        schedule=None if unmarked else schedule(wait=0, warmup=1, active=RECORDED_STEPS),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(1 + RECORDED_STEPS):
            step()
            if not unmarked:
                profiler.step()
        synchronize()
    dist.barrier()
    if rank == 0:
        described = {
            "name": name,
            "program": program,
            "options": RECORDINGS[name][1],
            "environment": environment,
            "step_ms": round(took_ms, 3),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        }
        (directory / "recorded.json").write_text(json.dumps(described, indent=1) + "\n")
    return took_ms


if __name__ == "__main__":
    sys.exit(main())
