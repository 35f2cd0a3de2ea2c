"""Defines scenarios, the process that runs one, and the models that several of them train."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], None]


@dataclass(frozen=True)
class Scenario:
    name: str
    # What was planted, and what may be found besides without being wrong.
    cause: str
    also: tuple[str, ...]
    program: str
    make: Callable[[Job], Step]
    devices: tuple[str, ...] = ("cuda", "cpu")
    environment: dict[str, str] = field(default_factory=dict)
    # The rank that is late, and what was planted into each process group.
    late_rank: int | None = None
    cause_by_group: dict[str, str] = field(default_factory=dict)
    # Scenarios that differ only in what is said here: the advice for this cause, followed.
    mends: dict[str, str] = field(default_factory=dict)
    # How much one step trains, relative to the scenario that this one mends.
    work: float = 1.0
    # Whether its traces are wanted, or only the time of its steps beside the scenario that it mends.
    recorded: bool = True
    active_steps: int = 3
    marked_steps: bool = True
    profiler: dict[str, Any] = field(default_factory=dict)

    def planted(self, device: str) -> dict[str, Any]:
        also = list(self.also)
        if device == "cpu":
            # Ranks and gloo's threads share the cores: each waits for the others at times.
            also += [cause for cause in ("straggler", "contention") if cause not in (self.cause, *also)]
        return {
            "cause": self.cause,
            "also": also,
            "late_rank": self.late_rank,
            "cause_by_group": self.cause_by_group,
        }


SCENARIOS: dict[str, Scenario] = {}


def needed(scenario: Scenario, device: str) -> dict[str, str]:
    """Returns the variables that the scenario needs on this device: on a CPU none has a meaning."""
    return scenario.environment if device == "cuda" else {}


def scenario(
    cause: str, *also: str, name: str = "", program: str = "", **fields: Any
) -> Callable[[Callable[[Job], Step]], Callable[[Job], Step]]:
    """Registers a program as a scenario of its own name: its docstring tells what it does. May be repeated."""

    def register(make: Callable[[Job], Step]) -> Callable[[Job], Step]:
        text = program or " ".join((make.__doc__ or "").split())
        known = Scenario(name or make.__name__, cause, also, text, make, **fields)
        SCENARIOS[known.name] = known
        return make

    return register


class Sizes(NamedTuple):
    hidden: int
    tokens: int
    layers: int


class Job:
    """One rank's process: its device, and its process groups by description."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # The module of streams, events and synchronize: a CPU has them in name only.
        self.module = torch.get_device_module(device)
        self._groups: dict[str, dist.ProcessGroup] = {}

    def group(self, description: str) -> dist.ProcessGroup:
        """A group of all ranks: traces show its description with each collective."""
        if description not in self._groups:
            self._groups[description] = dist.new_group(group_desc=description)
        return self._groups[description]

    def mesh(self, description: str) -> DeviceMesh:
        names = (description.lower(),)
        return DeviceMesh.from_group(self.group(description), self.device.type, mesh_dim_names=names)

    def sizes(self, cuda: Sizes, cpu: Sizes) -> Sizes:
        return cuda if self.on_gpu else cpu

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def weight(self, rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(self.random(rows, columns) / math.sqrt(columns))

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, device=self.device, dtype=self.dtype)

    def norm(self, width: int) -> nn.Module:
        return nn.RMSNorm(width, device=self.device, dtype=self.dtype)


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): 8 hidden^2 parameters, 48 hidden^2 operations a token forward and backward."""

    def __init__(self, job: Job, hidden: int, ffn: int = 0) -> None:
        super().__init__()
        ffn = ffn or 4 * hidden
        self.norm, self.up, self.down = job.norm(hidden), job.linear(hidden, ffn), job.linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """x + proj(attention(qkv(norm(x)))), causal, over sequences of `length` rows."""

    def __init__(self, job: Job, hidden: int, length: int) -> None:
        super().__init__()
        self.heads, self.length = max(1, hidden // 128), length
        self.norm, self.qkv, self.proj = job.norm(hidden), job.linear(hidden, 3 * hidden), job.linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(attended(self.qkv(self.norm(x)), self.heads, self.length))


def attended(qkv: Tensor, heads: int, length: int) -> Tensor:
    """Causal attention of `heads` heads: [rows, 3 width] to [rows, width]."""
    q, k, v = (part.view(-1, length, heads, part.shape[-1] // heads).transpose(1, 2) for part in qkv.chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(qkv.shape[0], -1)


def blocks(job: Job, sizes: Sizes) -> nn.Sequential:
    return nn.Sequential(*(Block(job, sizes.hidden) for _ in range(sizes.layers)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def ddp(job: Job, model: nn.Module, bucket_mb: float = 25, group: str = "DP") -> DistributedDataParallel:
    return DistributedDataParallel(
        model, process_group=job.group(group), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def training(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None, before_backward: Step | None = None
) -> Step:
    """A step of forward, backward and optimizer on the same x. Nothing in it waits for the device."""
    chosen = optimizer or adam(model)

    def step() -> None:
        loss = model(x).float().square().mean()
        if before_backward:
            before_backward()
        loss.backward()
        chosen.step()
        chosen.zero_grad()

    return step
