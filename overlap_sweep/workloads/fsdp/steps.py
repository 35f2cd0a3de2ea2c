"""Training steps (micro batches, gradients, optimizer), and the clock that times whole steps."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from overlap_sweep.measure import DTYPES, Ranks, stream
from overlap_sweep.measure.timing import Mark, Turn, Variant
from overlap_sweep.workloads.fsdp.collectives import FLOOR, Collectives, Span
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.ranking_model import Batch
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE

POOL = 8
"""Number of different micro batches."""
HELD_UP = 0.9
"""The host was held up in its launches if enqueuing takes more than this share of a step's time,"""
LEAD = 0.05
"""and the device still has more than this share of a step to run when the last one is enqueued."""


class MicroBatches(Iterator[Batch]):
    """This rank's parts of the micro batches, for ever. Samples depend neither on ranks nor on workers."""

    def __init__(self, point: Resolved, ranks: Ranks) -> None:
        """Draws them once and keeps them on the device, so that no loader disturbs the measurement; with
        `training.num_workers` starts a DataLoader, whose processes draw them again."""
        drawn, workers = _Drawn(point, ranks), point.training.num_workers
        self._device = ranks.device
        self._batches: Iterator[Batch] = cycle([self._moved(drawn[index]) for index in range(0 if workers else POOL)])
        if workers:
            on_gpu = ranks.device.type == "cuda"
            self._batches = iter(
                DataLoader(drawn, batch_size=None, sampler=cycle(range(POOL)), num_workers=workers, pin_memory=on_gpu)
            )

    def __next__(self) -> Batch:
        return self._moved(next(self._batches))

    def close(self) -> None:
        """Ends the loader's workers, and waits for them."""
        self._batches = iter(())

    def _moved(self, batch: Batch) -> Batch:
        return Batch(*(part.to(self._device, non_blocking=True) for part in batch))


class _Drawn(Dataset[Batch]):
    def __init__(self, point: Resolved, ranks: Ranks) -> None:
        self._point, self._ranks = point, ranks

    def __getitem__(self, index: int) -> Batch:
        ranking, per_rank = self._point.ranking, self._point.training.batch_size
        samples = per_rank * self._ranks.world_size
        generator = stream(torch.device("cpu"), self._point.workload.seed, f"micro batch {index}")
        rows, dense_features = ranking.vocab_size, ranking.num_dense_features

        def ids(count: int) -> torch.Tensor:
            return torch.randint(rows, (samples, count), generator=generator)

        dense = torch.randn(samples, dense_features, generator=generator)
        # A learnable label, so that the loss shows whether the gradients are right.
        clicked = (dense.mean(dim=1) > 0).float()
        whole = Batch(ids(ranking.num_sparse_features), ids(ranking.sequence_length), dense, clicked)
        mine = slice(self._ranks.rank * per_rank, (self._ranks.rank + 1) * per_rank)
        return Batch(*(part[mine] for part in whole))


@dataclass(frozen=True)
class Step:
    """A step as it was enqueued; its tensors and marks can be read when the device has passed them."""

    number: int
    started: float
    """Seconds since 1970."""
    begin: Mark
    end: Mark
    spans: list[Span]
    loss: Tensor
    """Mean over this rank's samples."""
    grad_norm: Tensor
    learning_rate: float
    loss_scale: float | None
    host_s: float
    """Time in which the host enqueued it, without known waits for the device."""


class TrainingSteps:
    def __init__(self, model: nn.Module, point: Resolved, ranks: Ranks, collectives: Collectives) -> None:
        training = point.training
        self.collectives = collectives
        self._model, self._training, self._ranks = model, training, ranks
        self._micro_batches = MicroBatches(point, ranks)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay, foreach=True
        )
        warmup_steps = training.warmup_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / (warmup_steps + 1))
        )
        self._scaler = torch.amp.GradScaler(ranks.device.type, enabled=training.mixed_precision == "fp16")
        # FSDP2 computes in what it gathers.
        by_autocast = isinstance(model, DistributedDataParallel) and point.precision != "fp32"
        self._autocast_dtype = DTYPES[point.precision] if by_autocast else None
        self._fixed_scale: float | None = None
        self._taken = 0

    def step(self, mode: str) -> Step:
        """Enqueues one step. Collective."""
        collectives, recorder = self.collectives, self.collectives.recorder
        collectives.mode = mode
        started, began_s, blocked_s = time.time(), time.perf_counter(), collectives.blocked_s
        learning_rate = float(self._schedule.get_last_lr()[0])
        loss_scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        collectives.start_step()
        with collectives.streams.computing():
            begin = recorder.mark()
            count = self._training.gradient_accumulation
            losses = [self._micro_batch(last=index == count - 1) for index in range(count)]
            collectives.end_step()
            recorder.begin_computing()
            grad_norm = self._update()
            recorder.end_computing()
            end = recorder.mark()
            with torch.no_grad():
                # Without no_grad, trace readers would take it for the last operation of the forward.
                loss = torch.stack(losses).mean()
        self._taken += 1
        waited_s = collectives.blocked_s - blocked_s
        return Step(
            number=self._taken - 1,
            started=started,
            begin=begin,
            end=end,
            spans=recorder.take(),
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            host_s=time.perf_counter() - began_s - waited_s,
        )

    def close(self) -> None:
        """Ends the processes that load data."""
        self._micro_batches.close()

    def freeze(self) -> None:
        """Freezes weights and loss scale, which would diverge without communication; further steps take as long."""
        self._fixed_scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._schedule.base_lrs = [0.0] * len(self._schedule.base_lrs)

    def _micro_batch(self, *, last: bool) -> Tensor:
        count = self._training.gradient_accumulation
        batch = next(self._micro_batches)
        reducing: AbstractContextManager[None] = nullcontext()
        # Gradients are accumulated, and reduced after the last micro batch.
        if not isinstance(self._model, DistributedDataParallel):
            self._model.set_requires_gradient_sync(last)  # type: ignore[operator]
        elif not last:
            reducing = self._model.no_sync()
        with reducing, self._autocast():
            loss = self._model(batch)
            self._scaler.scale(loss / count).backward()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, dtype=self._autocast_dtype)

    def _update(self) -> Tensor:
        """Clips, steps and clears. Returns the norm of the gradients before clipping, over all ranks."""
        self._scaler.unscale_(self._optimizer)
        parameters = list(self._model.parameters())
        limit = self._training.grad_clip_norm
        norm = self._norm([p.grad for p in parameters if p.grad is not None])
        if limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        began_s = time.perf_counter()
        self._scaler.step(self._optimizer)
        if self._scaler.is_enabled():
            # The scaler waits for the device to know whether the gradients are finite.
            self.collectives.blocked_s += time.perf_counter() - began_s
        self._scaler.update(self._fixed_scale)
        self._optimizer.zero_grad()
        self._schedule.step()
        return norm

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        if not sharded:
            return nn.utils.get_total_norm(gradients)
        squares = nn.utils.get_total_norm([gradient.to_local() for gradient in sharded]) ** 2
        group = sharded[0].device_mesh.get_group()
        if self.collectives.mode != FLOOR:
            self.collectives.alone(ALL_REDUCE, partial(dist.all_reduce, squares, group=group))
        return squares.sqrt()


class SteadyClock:
    """Times consecutive whole steps after an untimed one. No spin kernel: the host runs ahead as in training."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._host_us: dict[Variant, list[float]] = defaultdict(list)
        self._step_us: dict[Variant, list[float]] = defaultdict(list)
        self._lead: dict[Variant, list[float]] = defaultdict(list)

    def __call__(self, variant: Variant, repeat: int) -> Turn:
        """Returns the mean time of the steps. `variant.forward` runs one, and returns a `Step`. Collective."""
        self._ranks.barrier()
        variant.forward(repeat)
        steps = [variant.forward(repeat) for _ in range(self._steps)]
        enqueued_s = time.perf_counter()
        self._ranks.synchronize()
        lead_us = (time.perf_counter() - enqueued_s) * 1e6
        step_us = steps[-1].end.after_ns(steps[0].begin) / 1e3 / self._steps
        self._host_us[variant].append(fmean(step.host_s for step in steps) * 1e6)
        self._step_us[variant].append(step_us)
        self._lead[variant].append(lead_us / step_us)
        return Turn({"step": step_us}, late=False)

    def host_us(self, variant: Variant) -> float | None:
        """Returns the host's time per step: median over the rounds, slowest rank. None if the host was held up: a
        device queues about a thousand launches, and a step may have more. Collective."""
        host_us, behind = self._ranks.slowest([median(self._host_us[variant]), -median(self._lead[variant])])
        (step_us,) = self._ranks.slowest([median(self._step_us[variant])])
        held_up = host_us > HELD_UP * step_us and -behind > LEAD
        return None if held_up else host_us
