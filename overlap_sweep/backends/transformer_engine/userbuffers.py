"""Transformer Engine's userbuffers: initialised again in a living process whenever the configuration changes.

They print from C++; the worker has standard output redirected to the point's log.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformer_engine.pytorch.module import base

from overlap_sweep.errors import Refused
from overlap_sweep.overlap.space import Setting


@dataclass(frozen=True)
class Userbuffers:
    """What initialize_ub is given."""

    tokens: int
    hidden_size: int
    tp_size: int
    fp8: bool
    bootstrap_backend: str
    ub_cfgs: Mapping[str, Setting] = field(default_factory=dict)
    """By slot. What is not in it is set up as the library does by default, and used only by layers whose switches
    (`operator_switches`) are on."""

    @classmethod
    def of(cls, point: Mapping[str, Any], ub_cfgs: Mapping[str, Setting]) -> Userbuffers:
        return cls(
            tokens=point["workload"]["tokens"],
            hidden_size=point["model"]["hidden_size"],
            tp_size=point["tp_size"],
            fp8=point["precision"].startswith("fp8"),
            bootstrap_backend=point["runtime"]["bootstrap_backend"],
            ub_cfgs=ub_cfgs,
        )


_BROKEN = re.compile(r"CUDA error|out of memory|NCCL", re.IGNORECASE)
"""In the library's own RuntimeErrors: something went wrong, where the others say that something is not supported."""

_current: Userbuffers | None = None


def initialize(wanted: Userbuffers) -> None:
    """Have exactly this configuration initialised; nothing to do where it is. Collective.

    Refused, with the library's reason, when it does not take the configuration.
    """
    global _current
    if wanted == _current:
        return
    destroy()
    mode = base.UserBufferQuantizationMode
    # No rank may take down its buffers while another still reads them.
    torch.cuda.synchronize()
    dist.barrier()
    try:
        with _kept_bootstrap_groups(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            base.initialize_ub(
                [wanted.tokens, wanted.hidden_size],
                wanted.tp_size,
                quantization_modes=[mode.FP8 if wanted.fp8 else mode.NONE],
                dtype=torch.bfloat16,
                ub_cfgs={slot: dict(setting) for slot, setting in wanted.ub_cfgs.items()} or None,
                bootstrap_backend=wanted.bootstrap_backend,
            )
    except (ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, dist.DistError)) or _BROKEN.search(str(error)):
            raise
        base.destroy_ub()
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise Refused(f"Transformer Engine: {reason}") from error
    _current = wanted


def destroy() -> None:
    """Free the buffers. Collective, since other ranks may still be reading them."""
    global _current
    if _current is not None:
        torch.cuda.synchronize()
        dist.barrier()
        # destroy_ub also throws away all that torch.compile has made. Nothing compiled here knows of userbuffers, and
        # a layer's fused functions would take a tenth of a second to be compiled again at each turn.
        with patch.object(torch.compiler, "reset"):
            base.destroy_ub()
        _current = None


_groups: dict[Any, Any] = {}


@contextmanager
def _kept_bootstrap_groups() -> Iterator[None]:
    """Have initialize_ub use the same process groups every time.

    It makes new ones at each call and never destroys them: sockets and threads, or with NCCL half a gigabyte of GPU
    memory, for every point of a sweep.
    """

    def kept(name: str) -> Callable[..., Any]:
        make = getattr(dist, name)

        def get(*arguments: Any, **keywords: Any) -> Any:
            key = name, str(arguments), str(keywords)
            if key not in _groups:
                _groups[key] = make(*arguments, **keywords)
            return _groups[key]

        return get

    with (
        patch.object(dist, "new_group", kept("new_group")),
        patch.object(dist, "new_subgroups_by_enumeration", kept("new_subgroups_by_enumeration")),
    ):
        yield
