"""Records ten runs with something planted in each, for an agent that has nothing but the tools of `overlap-sweep mcp`:

    python -m benchmarks.agent_recordings OUT KEY [--seed N] [--only NAME,...]

OUT/r01 to r10 are the recordings, in an order that the seed gives: seven trainings of two processes over gloo on this
machine, two made timelines of GPUs and one made sweep. KEY is a JSON file with what was planted in each, what an answer
must say and what it must not; keep it where the agent does not look. docs/agents.md has the procedure.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_STEPS, RECORDED_STEPS, ATTEMPTS = 4, 5, 4


class Planted(NamedTuple):
    """What is planted in a recording, and how an answer is judged."""

    cause: str
    also_right: tuple[str, ...]
    """Causes that may be named besides, or first where they are as large."""
    must_say: str
    must_not_say: str
    make: str
    """How it is made: `torchrun`, or the name of a function of this module."""
    keeps: tuple[int, ...] = (0, 1)
    """Ranks whose traces are kept."""


KEY = {
    "loader_of_rank_1": Planted(
        "straggler",
        ("host_bound",),
        "rank 1 is late because its host waits for its DataLoader; load ahead (num_workers) or balance",
        "that the network or the buckets are to blame",
        "torchrun",
    ),
    "one_bucket": Planted(
        "issued_late",
        ("dependency", "bandwidth"),
        "all gradients are in one bucket, so that the all-reduce begins when backward is over: smaller bucket_cap_mb",
        "that the whole exposed time would be gained",
        "torchrun",
    ),
    "many_small_buckets": Planted(
        "latency",
        ("issued_late", "bandwidth", "dependency"),
        "very many small all-reduces: larger buckets",
        "that smaller buckets help",
        "torchrun",
    ),
    "sums_each_microbatch": Planted(
        "repeated_reduction",
        ("bandwidth",),
        "gradients are summed after each microbatch: no_sync() but for the last",
        "that it equals the present results bit by bit if the tool says rounding",
        "torchrun",
    ),
    "blocking_tensor_parallel": Planted(
        "dependency",
        ("contention",),
        "each layer needs the sum of the one before: overlap needs splitting the work, not another bucket size",
        "that bucket sizes or prefetching help",
        "torchrun",
    ),
    "well_hidden": Planted(
        "none",
        ("contention", "straggler"),
        "nothing worth changing: communication costs little of the step, or only what sharing two cores explains",
        "a gain that is to be expected of any setting",
        "torchrun",
    ),
    "half_of_a_straggler": Planted(
        "cannot tell",
        ("bandwidth", "latency", "issued_late", "unexplained", "dependency"),
        "one of two ranks' traces is missing: whether the other rank is late or the network slow cannot be told",
        "with certainty that the network is slow, or that a rank is late",
        "torchrun",
        keeps=(0,),
    ),
    "item_in_step": Planted(
        "host_sync",
        ("issued_late",),
        "the host waits for the GPU in mid-step (.item() or alike): read it later",
        "that the collective itself is slow",
        "host_sync_timeline",
    ),
    "one_rank_computes_more": Planted(
        "straggler",
        (),
        "rank 0 computes more than rank 1 in each step, which waits for it: balance the work",
        "that rank 1 is the slow one, or that the all-reduce needs more bandwidth",
        "straggler_timeline",
    ),
    "a_tie": Planted(
        "tie",
        (),
        "bucket=100 looks faster by about 1 % but within the noise of runs: keep what there is, or measure more; "
        "bucket=4 is slower",
        "that bucket=100 is faster",
        "tied_sweep",
    ),
}


def main() -> int:
    if "RANK" in os.environ:
        train(sys.argv[1], Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("key", type=Path)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="record these anew, where they are; commas between")
    given = parser.parse_args()
    given.key.parent.mkdir(parents=True, exist_ok=True)
    names = [*KEY]
    random.Random(given.seed).shuffle(names)
    described = {}
    for number, name in enumerate(names, 1):
        directory = given.out / f"r{number:02}"
        described[directory.name] = {"planted": name, "seed": given.seed, **KEY[name]._asdict()}
        if not given.only or name in given.only.split(","):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            (record if KEY[name].make == "torchrun" else globals()[KEY[name].make])(name, directory)
            print(f"{directory.name} recorded", flush=True)
    given.key.write_text(json.dumps(described, indent=1) + "\n")
    return 0


def record(name: str, directory: Path) -> None:
    """Records the training of that name with two processes, several times, and keeps the fastest: what else runs on
    this machine makes ranks wait for each other."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    with tempfile.TemporaryDirectory() as work:
        runs: dict[float, Path] = {}
        for attempt in map(str, range(ATTEMPTS)):
            run = Path(work) / attempt
            run.mkdir()
            port = f"--master-port={random.randint(20000, 60000)}"
            subprocess.run([*start, port, __file__, name, str(run)], check=True, stderr=subprocess.DEVNULL)
            runs[float((run / "took_s").read_text())] = run
        for rank in KEY[name].keeps:
            shutil.copy(runs[min(runs)] / f"trace_rank{rank}.json.gz", directory)


def train(name: str, directory: Path) -> None:
    """Runs and records the training as one of torchrun's processes."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = globals()[f"_{name}"](dist.get_rank())
    rank = dist.get_rank()
    plan = schedule(wait=0, warmup=WARM_UP_STEPS, active=RECORDED_STEPS, repeat=1)

    def export(profiler: Any) -> None:
        profiler.export_chrome_trace(str(directory / f"trace_rank{rank}.json.gz"))

    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=export, record_shapes=True
    ) as running:
        for number in range(WARM_UP_STEPS + RECORDED_STEPS):
            if number == WARM_UP_STEPS:
                began = time.monotonic()
            step()
            running.step()
    if rank == 0:
        (directory / "took_s").write_text(str(time.monotonic() - began))
    dist.destroy_process_group()


def _ddp(
    width: int, layers: int, rows: int, bucket_mb: float, batches: Iterator[Any] | None = None, micro: int = 1
) -> Callable[[], None]:
    """Returns a step of a training under DDP; `micro` microbatches, of which each is summed."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.SiLU())]
    model = DistributedDataParallel(nn.Sequential(*parts), bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fixed = torch.randn(rows, width)

    def step() -> None:
        for _ in range(micro):
            model(next(batches) if batches else fixed).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _slow_batches(rows: int, width: int, seconds: float) -> Iterator[Any]:
    """Yields batches of a DataLoader, each of which takes that long to make."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    made = torch.randn(rows, width)

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> Any:
            if index % rows == 0:
                time.sleep(seconds)
            return made[index % rows]

    yield from DataLoader(Slow(), batch_size=rows)  # Made by the training's own process, as by default.


def _loader_of_rank_1(rank: int) -> Callable[[], None]:
    return _ddp(256, 4, 512, 0.5, _slow_batches(512, 256, 0.09 if rank else 0.0))


def _half_of_a_straggler(rank: int) -> Callable[[], None]:
    step = _ddp(320, 4, 512, 1.0)

    def late() -> None:
        time.sleep(0.05 * rank)
        step()

    return late


def _one_bucket(rank: int) -> Callable[[], None]:
    return _ddp(768, 8, 192, 4000.0)


def _many_small_buckets(rank: int) -> Callable[[], None]:
    return _ddp(48, 160, 64, 0.0001)


def _sums_each_microbatch(rank: int) -> Callable[[], None]:
    return _ddp(896, 4, 24, 6.0, micro=5)


def _well_hidden(rank: int) -> Callable[[], None]:
    return _ddp(160, 6, 16384, 0.3)


def _blocking_tensor_parallel(rank: int) -> Callable[[], None]:
    import torch
    import torch.distributed as dist
    from torch import nn

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return gradient

    up = nn.ModuleList(nn.Linear(384, 512, bias=False) for _ in range(5))
    down = nn.ModuleList(nn.Linear(512, 384, bias=False) for _ in range(5))
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=1e-3)
    fixed = torch.randn(768, 384)

    def step() -> None:
        x = fixed
        for first, second in zip(up, down, strict=True):
            x = x + Summed.apply(second(torch.relu(first(x))))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def host_sync_timeline(_: str, directory: Path) -> None:
    """Writes timelines of two GPUs whose host reads a value after each of four layers, before it launches the next."""
    from tests.timeline import Timeline

    for rank in (0, 1):
        made = Timeline(rank)
        for number in range(4):
            at = 20_000 * number
            made.step(number, at, at + 20_000)
            for layer in range(4):
                start = at + 100 + 2400 * layer
                made.operator("aten::mm", start - 60, start - 20)
                made.kernel(start, start + 2000, launch=start - 30)
                made.operator("aten::item", start + 60, start + 2060)
                made.wait(start + 80, start + 2040)
            made.backward(at + 9620, at + 9900)
            made.kernel(at + 9700, at + 14_700, "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_NNT", at + 9660)
            made.collective("all_reduce", at + 10_200, at + 12_200, launch=at + 9700)
            made.kernel(at + 14_700, at + 17_900, "elementwise_kernel", at + 9750)
            made.optimizer(at + 9900, at + 10_400)
            made.kernel(at + 17_900, at + 20_060, "multi_tensor_apply_kernel", launch=at + 10_000)
        made.write(directory / f"trace_rank{rank}.json.gz")


def straggler_timeline(_: str, directory: Path) -> None:
    """Writes timelines of two GPUs of which the first computes half as long again before each reduction. Their hosts
    wait for the device at the end of each step, as programs do that print the loss."""
    from tests.timeline import Timeline

    for rank in (0, 1):
        made = Timeline(rank)
        for number in range(5):
            at, computed = 30_000 * number, 12_000 if rank else 18_000
            made.step(number, at, at + 30_000)
            made.operator("aten::mm", at + 50, at + 150)
            made.kernel(at + 110, at + 110 + computed // 2, launch=at + 100)
            made.backward(at + 300, at + 600)
            made.kernel(at + 110 + computed // 2, at + 110 + computed, launch=at + 400)
            made.collective("all_reduce", at + 110 + computed, at + 21_110, launch=at + 500)
            made.optimizer(at + 700, at + 900)
            made.kernel(at + 21_120, at + 29_970, "multi_tensor_apply_kernel", launch=at + 800)
            made.wait(at + 920, at + 29_980, "cudaDeviceSynchronize")
        made.write(directory / f"trace_rank{rank}.json.gz")


def tied_sweep(_: str, directory: Path) -> None:
    """Writes a sweep of a training command over bucket sizes, three runs each, of which two tie."""
    from tests.listed_points import write_points

    times_us = {25: (81_200, 79_500, 82_400), 100: (80_300, 82_000, 78_400), 4: (95_100, 93_900, 96_600)}
    points = [
        {"values": {"bucket": bucket}, "job.ranks": 2, "repetition": run, "step_us": runs[run], "spread_us": 300}
        for run in range(3)
        for bucket, runs in times_us.items()
    ]
    write_points("job", directory, points)


if __name__ == "__main__":
    sys.exit(main())
