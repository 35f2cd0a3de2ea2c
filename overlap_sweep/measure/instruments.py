"""Looks into a point at the cost of its times: prints what this rank does (`runtime.debug`), names passes by NVTX
ranges (`runtime.nvtx`), and starts and stops Nsight Systems (`runtime.nsys`).

The worker switches it on for a point; otherwise nothing here has an effect.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.config import Runtime
from overlap_sweep.measure import Ranks

if TYPE_CHECKING:
    from overlap_sweep.measure.timing import Variant

DIFFERENT = 0.01
"""A row of a checked tensor is named if it differs by more than this share of the reference's largest magnitude."""


@dataclass(frozen=True)
class _Instruments:
    """What is on for the current point."""

    ranks: Ranks
    debug: bool
    nvtx: bool
    nsys: bool
    began_s: float = field(default_factory=time.perf_counter)


_current: _Instruments | None = None


@contextmanager
def instruments(runtime: Runtime, ranks: Ranks) -> Iterator[None]:
    """Switches on inside the block what a point's `runtime` asks for."""
    global _current
    on_gpu = ranks.device.type == "cuda"
    debug, nvtx, nsys = runtime.debug, runtime.nvtx, runtime.nsys
    if debug or nvtx or nsys:
        _current = _Instruments(ranks, debug, nvtx=on_gpu and (nvtx or nsys), nsys=on_gpu and nsys)
    try:
        yield
    finally:
        _current = None


def debugging() -> bool:
    """Returns whether `say` prints."""
    return _current is not None and _current.debug


def say(text: str) -> None:
    """Prints a line, after the rank and the time since the point began, if the point is debugged."""
    if _current and _current.debug:
        seconds = time.perf_counter() - _current.began_s
        # In one piece, because all ranks write to the same log.
        sys.stdout.write(f"[rank {_current.ranks.rank}, {seconds:.3f} s] {text}\n")
        sys.stdout.flush()


def say_groups(groups: Mapping[str, dist.ProcessGroup | None]) -> None:
    """Prints the ranks of this rank's groups, by kind, if the point is debugged. None: this rank alone."""
    if not _current or not _current.debug:
        return
    alone = [_current.ranks.rank]
    members = {kind: dist.get_process_group_ranks(group) if group else alone for kind, group in groups.items()}
    say("groups: " + ", ".join(f"{kind} {ranks}" for kind, ranks in members.items()))


def say_loss(output: Tensor, gradient: Tensor) -> None:
    """Prints the loss that has this gradient with respect to the output, of this rank's part, if the point is
    debugged."""
    if debugging():
        say(f"loss {float((output.detach().double() * gradient.double()).sum()):.6g} (sum of output x its gradient)")


@contextmanager
def named_range(name: str, turn: int | None = None) -> Iterator[None]:
    """Names what the block enqueues for profilers, prints when it begins and ends, and waits for it, as the point asks.
    Ranges of all turns have the same name, so that profilers can sum them."""
    if _current is None:
        yield
        return
    if _current.nvtx:
        torch.cuda.nvtx.range_push(name)
    say(f"{name}{'' if turn is None else f', turn {turn}'}: begins")
    try:
        yield
    finally:
        if _current.nvtx:
            torch.cuda.nvtx.range_pop()
    if _current.debug:
        _current.ranks.synchronize()
        say(f"{name}: ends")


def named(name: str, variant: Variant) -> Variant:
    """Returns the variant with a range around each of its passes, as the point asks. A named variant keeps its name."""
    if _current is None or not (_current.debug or _current.nvtx) or isinstance(variant.forward, _NamedPass):
        return variant
    return replace(
        variant,
        forward=_NamedPass(f"{name} fwd", variant.forward),
        both=variant.both and _NamedPass(f"{name} both", variant.both),
        backward=variant.backward and _NamedPass(f"{name} bwd", variant.backward),
        step=variant.step and _NamedPass(f"{name} step", variant.step),
        prepare=variant.prepare and _NamedPass(f"{name} prepare", variant.prepare),
    )


@dataclass(frozen=True)
class _NamedPass:
    """A pass of a variant, in a range. The turn's number is the first argument of those passes that have any."""

    name: str
    run: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        with named_range(self.name, arguments[0] if arguments else None):
            result = self.run(*arguments)
            gradients = f" with {len(result)} gradients" if isinstance(result, Mapping) else ""
            output = f" with output {_shape(result)}" if isinstance(result, Tensor) else gradients
            say(f"{self.name}: enqueued{output}")
        return result


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def say_difference(what: str, ours: Tensor, reference: Tensor) -> None:
    """Prints norms of a checked tensor and of its reference, and where they differ most, if the point is debugged."""
    if not debugging():
        return
    found, expected = ours.detach().float(), reference.detach().float()
    difference = (found - expected).abs()
    at = [int(index) for index in torch.unravel_index(difference.argmax(), difference.shape)]
    broken = int((~found.isfinite()).sum())
    row_differences = difference.reshape(len(difference), -1).amax(1) if difference.dim() else difference.reshape(1)
    rows = (~(row_differences <= DIFFERENT * expected.abs().max())).nonzero().flatten().tolist()
    lines = f"; rows {rows[0]} to {rows[-1]} differ ({len(rows)} of {len(row_differences)})" if rows else ""
    say(
        f"check: {what} {_shape(ours)}: norm {found.norm():.6g}, reference {expected.norm():.6g}, largest difference "
        f"{difference[tuple(at)]:.3g} at {at}{f', {broken} NaN or infinite' if broken else ''}{lines}"
    )


def nsys_records() -> bool:
    """Returns whether Nsight Systems records this process, so that torch.profiler cannot."""
    return _current is not None and _current.nsys


@contextmanager
def recorded_by_nsys() -> Iterator[None]:
    """Has Nsight Systems record inside the block. Collective, since the first rank that leaves it ends the recording
    of all."""
    assert _current
    _current.ranks.barrier()
    with torch.cuda.profiler.profile():
        yield
        _current.ranks.barrier()
