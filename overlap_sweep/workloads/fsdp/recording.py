"""From steps to the lines of a rank's telemetry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.measure.environment import DeviceSampler
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import Anchor
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.spans import resolve
from overlap_sweep.workloads.fsdp.steps import Step
from overlap_sweep.workloads.fsdp.telemetry import StepRecord, overlap_of, write_metrics


class Recording:
    """Keeps steps until it is told to write: to read a mark is to wait for the device."""

    def __init__(self, directory: Path, ranks: Ranks, sampler: DeviceSampler, log_interval: int) -> None:
        self.losses: list[float | None] = []
        """Of the steps that were not profiled, mean over all ranks; None where it is no number."""
        self._path, self._ranks, self._sampler = directory / metrics_file(ranks.rank), ranks, sampler
        self._log_interval = log_interval
        self._waiting: list[tuple[Step, bool]] = []
        self._anchor = self._new_anchor()

    def add(self, step: Step, profiled: bool = False) -> None:
        """Writes every `log_interval` steps. Collective."""
        self._waiting.append((step, profiled))
        if (step.number + 1) % self._log_interval == 0:
            self.write()

    def write(self) -> None:
        """What waits to be written. Collective."""
        if not self._waiting:
            return
        self._ranks.synchronize()
        steps = [step for step, _ in self._waiting]
        losses = _means([step.loss for step in steps], self._ranks)
        records = [
            self._record(step, loss, profiled) for (step, profiled), loss in zip(self._waiting, losses, strict=True)
        ]
        write_metrics(self._path, records)
        self.losses += [record.loss for record in records if not record.profiled]
        self._waiting.clear()
        self._anchor = self._new_anchor()
        last = records[-1]
        if self._ranks.rank == 0:
            print(
                f"step {last.step}: loss {losses[-1]:.4f}, {last.step_ms:.2f} ms, "
                f"{last.exposed_comm_ms:.2f} ms of communication exposed",
                flush=True,
            )

    def _new_anchor(self) -> Anchor:
        self._ranks.synchronize()
        return Anchor(self._ranks.device)

    def _record(self, step: Step, loss: float, profiled: bool) -> StepRecord:
        step_ns = step.end.after_ns(step.begin)
        sample = self._sampler.last_before(step.started + step_ns / 1e9)
        norm = float(step.grad_norm)
        return StepRecord(
            step=step.number,
            rank=self._ranks.rank,
            started=step.started,
            profiled=profiled,
            loss=loss if math.isfinite(loss) else None,
            learning_rate=step.learning_rate,
            grad_norm=norm if math.isfinite(norm) else None,
            loss_scale=step.loss_scale,
            device=sample.values,
            rocm_smi_output=sample.rocm_smi_output,
            **overlap_of(resolve(step.spans, step.begin, self._anchor), step_ns),
        )


def _means(losses: Sequence[Tensor], ranks: Ranks) -> list[float]:
    mean = torch.stack(list(losses)).double() / ranks.world_size
    if ranks.world_size > 1:
        dist.all_reduce(mean)
    found: list[float] = mean.tolist()
    return found
