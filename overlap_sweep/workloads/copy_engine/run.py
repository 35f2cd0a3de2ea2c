"""GEMMs on the current stream and copies on a high-priority stream: each alone, in sequence, and overlapped.

On H200s copies in every direction are memory copies in a trace (`Memcpy DtoD`, `PtoP`, `HtoD`, `DtoH`), not kernels,
and need no SM: with all SMs taken by a kernel of 35 ms they ran at nearly full speed. Copies to another GPU or to the
host don't slow down concurrent GEMMs; copies within the same memory do, since they take most of its bandwidth.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from overlap_sweep.errors import Refused, WrongNumbers
from overlap_sweep.measure import Ranks, stream
from overlap_sweep.measure.profile import BY_ROCPROFV3, capture_each
from overlap_sweep.measure.timing import STREAM_PRIORITY, Variant, summarise, time_variants
from overlap_sweep.workloads import MeasuredFields
from overlap_sweep.workloads.copy_engine.config import Resolved
from overlap_sweep.workloads.copy_engine.result import CHUNKED, VARIANTS, CopyTimes

MIB = 2**20
LEAST_COPIED_BYTES = 256 * MIB
"""Bytes copied before a buffer is used again: several times the size of an L2 cache."""
TOLERANCE = 0.1
"""Largest difference between elements of products, whose variance is 1, by GEMMs of other shapes, which round
differently."""
# Grad mode is per thread. With it on, trace readers would take this thread for the one that computes.
_OTHER_THREAD = ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,))


@dataclass(frozen=True)
class Work:
    """The GEMMs and the copies; each runs on the current stream."""

    gemms: Callable[[], None]
    chunks: Callable[[], None]
    copies: Callable[[], None]
    stream: torch.cuda.Stream | None
    """Stream of the overlapped copies; None on a CPU, where another thread copies."""
    product: Tensor
    """Product of the GEMMs: [matrix_size, matrix_size]."""
    pairs: list[tuple[Tensor, Tensor]]

    def run(self, name: str, _turn: int = 0) -> None:
        """Runs a variant once."""
        gemms = self.chunks if name in CHUNKED else self.gemms
        if name == "sequential":
            gemms()
            self.copies()
        elif "overlapped" in name:
            with self._copying():
                gemms()
        elif name == "copy":
            with self._copying():
                pass
        else:
            gemms()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Runs the copies concurrently with the block, and ends when both have ended."""
        if self.stream is None:
            # copy_ releases the GIL.
            copied = _OTHER_THREAD.submit(self.copies)
            yield
            copied.result()
            return
        # The current stream waits for both, so that timing it times both.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.copies()
        yield
        current.wait_stream(self.stream)


@torch.no_grad()
def run(point: Resolved, directory: Path, ranks: Ranks) -> MeasuredFields:
    """Returns the measured fields of the point's Result. `Refused` if GPUs cannot reach each other's memory."""
    options, workload = point.copy_engine, point.workload
    assert workload.repeats
    work = _work(point, ranks)
    names = (*VARIANTS, *CHUNKED) if options.chunks else VARIANTS
    _check(work, ranks, chunked=bool(options.chunks))
    variants = {name: Variant(partial(work.run, name)) for name in names}
    samples = time_variants(variants, ranks, workload.warmup, workload.repeats)
    # The usual names of a point's own trace and of that with no overlap.
    profiled = {"": variants[names[-1]], "none": variants["sequential"]}
    traces, warnings = [], []
    if point.profile != "none" and torch.version.hip:
        warnings = [BY_ROCPROFV3]
    elif point.profile != "none":
        traces = capture_each(profiled, ranks, 2, directory)
    times = {name: summarise(taken.us["all"]) for name, taken in samples.items()}
    launch_bound = {name: taken.launch_bound for name, taken in samples.items()}
    return {
        "measured": CopyTimes(
            times=times,
            launch_bound=launch_bound,
            bytes_copied=round(options.copy_mb * MIB) * options.copies,
            flops=2 * options.matrix_size**3 * options.gemms,
        ),
        "objective_us": times[names[-1]].median_us,
        "launch_bound": any(launch_bound.values()),
        "traces": traces,
        "warnings": warnings,
    }


def _work(point: Resolved, ranks: Ranks) -> Work:
    options = point.copy_engine
    generator = stream(ranks.device, point.workload.seed, "copy_engine")
    dtype, size = getattr(torch, options.dtype), options.matrix_size
    left, right = (
        torch.randn(size, size, dtype=dtype, device=ranks.device, generator=generator) * size**-0.25 for _ in range(2)
    )
    product = torch.empty_like(left)
    parts = list(zip(*(matrix.tensor_split(options.chunks or 1) for matrix in (left, product)), strict=True))
    source, target = _places(options.direction, ranks.device)
    # Enough different buffers that the caches don't hold them, but no more than there are copies.
    size_bytes = round(options.copy_mb * MIB)
    count = min(options.copies, math.ceil(LEAST_COPIED_BYTES / size_bytes))
    drawn = torch.randint(-128, 128, (count, size_bytes), dtype=torch.int8, device=ranks.device, generator=generator)
    pairs = [(source(values), target(torch.zeros_like(values))) for values in drawn]

    def gemms() -> None:
        for _ in range(options.gemms):
            torch.mm(left, right, out=product)

    def chunks() -> None:
        for _ in range(options.gemms):
            for rows, target_rows in parts:
                torch.mm(rows, right, out=target_rows)

    def copies() -> None:
        for index in range(options.copies):
            origin, goal = pairs[index % count]
            goal.copy_(origin, non_blocking=True)

    on_gpu = ranks.device.type == "cuda"
    other = torch.cuda.Stream(ranks.device, priority=STREAM_PRIORITY["high"]) if on_gpu else None
    return Work(gemms, chunks, copies, other, product, pairs)


def _places(direction: str, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Returns the functions that move a tensor to the source and to the target of the copies."""
    here, host = Tensor.clone, lambda tensor: tensor.cpu().pin_memory()
    if direction == "peer":
        peer = torch.device("cuda", (device.index or 0) + 1)
        # Without peer access torch copies through the host's memory.
        if not torch.cuda.can_device_access_peer(device, peer):
            raise Refused(f"{device} has no peer access to {peer}")
        return here, lambda tensor: tensor.to(peer)
    return {"device_to_device": (here, here), "host_to_device": (host, here), "device_to_host": (here, host)}[direction]


def _check(work: Work, ranks: Ranks, *, chunked: bool) -> None:
    """Raises WrongNumbers unless overlapped GEMMs and copies give the same results as alone, and GEMMs in chunks the
    same as whole ones."""
    work.gemms()
    expected = work.product.clone()
    work.product.zero_()
    work.run("overlapped")
    ranks.synchronize()
    copied = all(torch.equal(origin.cpu(), goal.cpu()) for origin, goal in work.pairs)
    if not (copied and torch.equal(work.product, expected)):
        raise WrongNumbers("wrong numbers: overlapped GEMMs or copies differ from those run alone", {})
    if chunked:
        work.product.fill_(math.nan)
        work.run("chunked_overlapped")
        ranks.synchronize()
        # Not true for NaN.
        if not float((work.product - expected).abs().max()) <= TOLERANCE:
            raise WrongNumbers("wrong numbers: GEMMs in chunks differ from whole ones", {})
