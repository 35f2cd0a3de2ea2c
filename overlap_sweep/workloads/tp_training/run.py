"""A training run of one implementation: timed steps, with marks between their parts, then profiled steps. Also what all
implementations share: groups of ranks, initial weights by Hugging Face name, and batches of tokens, which are drawn
before the first step.

An implementation (stack) is a class that is called with point, ranks and groups on every rank, and follows the protocol
Implementation with the weights of `initial_weights`. If it raises Refused, the point is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks, stream
from overlap_sweep.measure.instruments import named_range
from overlap_sweep.measure.profile import ProfiledSteps, profile_steps
from overlap_sweep.measure.timing import Anchor, Mark
from overlap_sweep.workloads import MeasuredFields
from overlap_sweep.workloads.tp_training.config import Resolved, ResolvedTraining, registered_implementations
from overlap_sweep.workloads.tp_training.language_model import architecture
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep

HOST_LEADS = 0.05
"""A step is launch-bound if the host's lead at the end of the backward is below this share of it. Before the optimizer,
since some stacks wait for the device there."""
_GB = 1e9
LESS_MEMORY = (
    "out of device memory; give a smaller tp_training.batch_size or tp_training.seq_length, "
    "tp_training.activation_checkpointing=true, a larger tp_size, or fewer layers (model.num_layers)"
)


@dataclass(frozen=True)
class Groups:
    """This rank's groups. Tensor-parallel ranks are neighbours and compute the same tokens; data-parallel ranks have
    the same weights."""

    mesh: DeviceMesh
    """[dp, tp]."""
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int


@cache
def groups_of(ranks: Ranks, tp_size: int, dp_size: int) -> Groups:
    """Returns the groups, made once for all points of a process. Collective."""
    assert tp_size * dp_size == ranks.world_size
    mesh = init_device_mesh(ranks.device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    tp_rank, dp_rank = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    return Groups(mesh, mesh.get_group("tp"), mesh.get_group("dp"), tp_size, tp_rank, dp_size, dp_rank)


@dataclass(frozen=True)
class Facts:
    """Facts about a run that only the implementation knows."""

    details: dict[str, object] = field(default_factory=dict)
    """Details for result.json, such as the attention backend."""
    warnings: list[str] = field(default_factory=list)
    """Caveats for the reader, one sentence each."""


class Implementation(Protocol):
    """A model in training on this rank. Nothing here waits for the device unless the stack itself does."""

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        """Returns the loss of one micro batch, mean over this data-parallel rank's tokens, float32, the same on all its
        tensor-parallel ranks. tokens, labels: [batch, sequence], int64; labels are those of the next token already.
        `last`: of the step's micro batches."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Runs backward from the loss that `forward` returned. Gradients are averaged over micro batches and
        data-parallel ranks; they are reduced with the last one, unless the stack reduces each."""
        ...

    def update(self) -> Tensor:
        """Clips, takes the optimizer's step, clears the gradients. Returns the norm of the gradients before, over all
        parameters and ranks: a scalar on any device; not finite if the step was left out (float16)."""
        ...

    def facts(self) -> Facts:
        """Returns the facts; called once, after the last step."""
        return Facts()

    def close(self) -> None:
        """Frees what outlives the object: process groups of its own, buffers, state of the library's. Collective."""
        ...


def load(impl: str) -> Callable[[Resolved, Ranks, Groups], Implementation]:
    """Returns the stack's class. Refused if another package's cannot be imported."""
    if impl not in _CLASSES:
        entry = registered_implementations()[impl]
        try:
            return cast(type[Implementation], entry.load())
        except Exception as error:
            # Importing another package's code can raise anything.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise Refused(f"impl={impl} cannot be loaded from {entry.value} ({reason}); fix that package") from error
    module, name = _CLASSES[impl]
    stack: type[Implementation] = getattr(import_module(f"{__package__}.{module}"), name)
    return stack


_CLASSES = {
    "autotp": ("autotp", "AutoTp"),
    "fsdp_dtensor": ("fsdp_dtensor", "FsdpDtensor"),
    "async_tp": ("fsdp_dtensor", "AsyncTp"),
    "megatron": ("megatron", "Megatron"),
}


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Returns the padded size: the same number of rows on every tensor-parallel rank, divisible by 8 for fast GEMMs."""
    multiple = 8 * tp_size
    return -(-vocab_size // multiple) * multiple


def initial_weights(point: Resolved, ranks: Ranks) -> Callable[[str, Sequence[int]], Tensor]:
    """Returns a function that draws a parameter by Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`,
    and whole shape, of embedding and output projection with padding: float32, on the device, same on all ranks and for
    all callers. Norms are one, biases zero, padding zero, all else normal.

    One parameter is whole at a time: whoever asks cuts out its part and lets go of the rest.
    """
    seed, model = point.tp_training.seed, point.trained
    of = architecture(model.model_type)

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(*shape, device=ranks.device)
        if len(shape) == 1:
            return torch.ones(*shape, device=ranks.device)
        weight = torch.zeros(*shape, device=ranks.device)
        # The padding is no part of the draw, which would else depend on the number of ranks.
        rows = model.vocab_size if name in (f"{of.embedding}.weight", f"{of.output}.weight") else shape[0]
        weight[:rows].normal_(std=model.initializer_range, generator=stream(ranks.device, seed, name))
        return weight

    return draw


MOST_BATCHES = 128
"""Number of different micro batches; longer runs start over. With few of them the model would memorise the data, and
rounding dominates a loss near zero."""
SKEW = 4
"""Skew of the token distribution: low tokens are frequent, as in language, so that the model can learn, and the loss
shows whether the gradients are right."""


def token_batches(point: Resolved, ranks: Ranks, dp_rank: int) -> list[tuple[Tensor, Tensor]]:
    """Returns tokens and the next token of each, [batch, sequence], int64, on the device, by micro batch: the same for
    all implementations, and on the tensor-parallel ranks of a data-parallel one."""
    training, profiled = point.tp_training, point.workload.profiled
    # One profiled step is thrown away.
    steps = training.num_training_steps + profiled + 1
    count = min(MOST_BATCHES, steps * training.gradient_accumulation_steps)
    return [_draw(point, ranks, dp_rank, index) for index in range(count)]


def _draw(point: Resolved, ranks: Ranks, dp_rank: int, index: int) -> tuple[Tensor, Tensor]:
    training = point.tp_training
    generator = stream(torch.device("cpu"), training.seed, f"micro batch {index}", dp_rank)
    shape = training.batch_size, training.seq_length + 1
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) ** SKEW
    tokens = (drawn * point.trained.vocab_size).long().to(ranks.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(point: Resolved, directory: Path, ranks: Ranks) -> MeasuredFields:
    """Returns the measured fields of the point's Result. Collective."""
    training, tokens, model = point.tp_training, point.workload.tokens, point.trained
    with ranks.memory_freed():
        try:
            steps, profiled, facts = _train(point, directory, ranks)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            raise torch.OutOfMemoryError(f"{LESS_MEMORY} ({reason})") from error
    ahead_us = steps.least_ahead_us()
    measured = TpTrainingRun(
        steps=steps.read_steps,
        parameters=model.parameters,
        tokens_per_step=tokens,
        samples_per_step=tokens // training.seq_length,
        flops_per_step=tokens * model.flops_per_token(training.seq_length),
        host_ahead_us=ahead_us,
        details=facts.details,
    )
    step_us = measured.timing.median_us
    return {
        "measured": measured,
        "objective_us": step_us,
        "launch_bound": ahead_us is not None and ahead_us < HOST_LEADS * step_us,
        "traces": profiled.traces,
        "warnings": [*facts.warnings, *profiled.warnings],
    }


def _train(point: Resolved, directory: Path, ranks: Ranks) -> tuple[StepReader, ProfiledSteps, Facts]:
    """Trains, then profiles. The result holds nothing of the model, which is garbage then. After a failure the
    processes end, so that nothing is closed: other ranks might not be there to do it, too."""
    groups, profiled = groups_of(ranks, point.tp_size, point.dp_size), ProfiledSteps()
    batches = cycle(token_batches(point, ranks, groups.dp_rank))
    built = load(point.impl)(point, ranks, groups)
    step = partial(training_step, built, batches, point.tp_training.gradient_accumulation_steps, ranks)
    steps = StepReader(ranks, groups.dp, point.tp_training)
    for number in range(point.tp_training.num_training_steps):
        with named_range(f"step {number}"):
            steps.add(step())
    steps.read()
    if point.profile != "none":
        schedule = {"wait": 0, "warmup": 1, "active": point.workload.profiled, "repeat": 1}
        output = {"chrome_trace": True, "tensorboard": False}
        recorded = {"record_shapes": False, "profile_memory": False, "with_stack": False}
        profiled = profile_steps(step, ranks, {**schedule, **output, **recorded}, directory)
    facts = built.facts()
    built.close()
    return steps, profiled, facts


@dataclass(frozen=True)
class Step:
    """An enqueued step."""

    micro_batches: list[tuple[Mark, Mark, Mark]]
    """Marks of each micro batch: begin of forward, begin of backward, end of backward."""
    end: Mark
    loss: Tensor
    """Mean over this rank's micro batches."""
    grad_norm: Tensor
    memory_gb: dict[str, float]
    """Allocated and peak memory, by field of TpTrainingStep; empty on a CPU."""

    @property
    def computed(self) -> Mark:
        """Returns the mark at the end of its last backward."""
        return self.micro_batches[-1][-1]

    def of_rank(self) -> dict[str, float]:
        """Returns this rank's values by field of TpTrainingStep; the largest of all ranks counts. The device must have
        passed the step's end."""
        times_ns = {
            "step_us": self.end.after_ns(self.micro_batches[0][0]),
            "forward_us": sum(between.after_ns(begin) for begin, between, _ in self.micro_batches),
            "backward_us": sum(end.after_ns(between) for _, between, end in self.micro_batches),
            "optimizer_us": self.end.after_ns(self.computed),
        }
        return {
            "grad_norm": float(self.grad_norm),
            **{name: ns / 1e3 for name, ns in times_ns.items()},
            **self.memory_gb,
        }


def training_step(
    built: Implementation, batches: Iterator[tuple[Tensor, Tensor]], micro_batches: int, ranks: Ranks
) -> Step:
    """Enqueues one step of `micro_batches` pairs of tokens and labels. Collective."""
    marks, losses = [], []
    for left in reversed(range(micro_batches)):
        tokens, labels = next(batches)
        begin = Mark(ranks.device)
        loss = built.forward(tokens, labels, last=left == 0)
        between = Mark(ranks.device)
        built.backward(loss, last=left == 0)
        marks.append((begin, between, Mark(ranks.device)))
        losses.append(loss.detach())
    grad_norm = built.update().detach()
    end = Mark(ranks.device)
    memory_gb: dict[str, float] = {}
    if ranks.device.type == "cuda":
        memory_gb["memory_allocated_gb"] = torch.cuda.memory_allocated(ranks.device) / _GB
        memory_gb["memory_peak_gb"] = torch.cuda.max_memory_allocated(ranks.device) / _GB
    return Step(marks, end, torch.stack(losses).mean(), grad_norm, memory_gb)


class StepReader:
    """Keeps steps until `read`, since reading a mark waits for the device."""

    def __init__(self, ranks: Ranks, dp: dist.ProcessGroup, training: ResolvedTraining) -> None:
        self.read_steps: list[TpTrainingStep] = []
        self._ahead_us: list[float] = []
        """By timed step how much later than the host the device came to the end of the backward, on this rank."""
        self._ranks, self._dp = ranks, dp
        self._warmup_steps, self._log_interval = training.warmup_steps, training.log_interval
        self._waiting: list[Step] = []
        ranks.synchronize()
        self._anchor = Anchor(ranks.device)
        # Of building the model, and of earlier points of the process.
        self._forget_peak()

    def add(self, step: Step) -> None:
        """Adds a step; reads at the end of the warm-up, whose peak of memory counts for nothing, and every
        `log_interval` steps. Collective."""
        self._waiting.append(step)
        taken = len(self.read_steps) + len(self._waiting)
        if taken == self._warmup_steps or taken % self._log_interval == 0:
            self.read()
        if taken == self._warmup_steps:
            self._forget_peak()

    def read(self) -> None:
        """Reads the pending steps. Collective."""
        if not self._waiting:
            return
        self._ranks.synchronize()
        mean = torch.stack([step.loss for step in self._waiting]).double() / dist.get_world_size(self._dp)
        dist.all_reduce(mean, group=self._dp)
        losses: list[float] = mean.tolist()
        of_rank = [step.of_rank() for step in self._waiting]
        slowest = iter(self._ranks.slowest([value for values in of_rank for value in values.values()]))
        for step, loss, values in zip(self._waiting, losses, of_rank, strict=True):
            number = len(self.read_steps)
            of_step = {"loss": loss} | dict(zip(values, slowest, strict=False))
            found: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in of_step.items()}
            self.read_steps.append(TpTrainingStep(step=number, warmup=number < self._warmup_steps, **found))
            if number >= self._warmup_steps:
                self._ahead_us.append(self._anchor.lead_ns(step.computed) / 1e3)
        self._waiting.clear()
        self._ranks.synchronize()
        self._anchor = Anchor(self._ranks.device)
        if self._ranks.rank == 0:
            print(f"step {number}: loss {loss:.4f}, {found['step_us']:,.0f} us", flush=True)

    def least_ahead_us(self) -> float | None:
        """Returns `TpTrainingRun.host_ahead_us`. Collective."""
        if self._ranks.device.type != "cuda":
            return None
        return -self._ranks.slowest([-torch.tensor(self._ahead_us).median().item()])[0]

    def _forget_peak(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._ranks.device)
