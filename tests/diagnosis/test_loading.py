"""A training that waits for its data, profiled for real."""

import time
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, Dataset

from overlap_sweep.diagnosis.facts import facts_of
from overlap_sweep.diagnosis.findings import diagnosis_of
from overlap_sweep.trace.kineto import read_trace

STEPS = 6


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(64, 64)


@pytest.mark.parametrize(
    ("workers", "advice"),
    [(0, "DataLoader(num_workers=N, persistent_workers=True), N up to a rank's cores"), (1, "more num_workers")],
)
def test_torchs_own_loader_is_named(tmp_path: Path, workers: int, advice: str) -> None:
    weight = torch.ones(64, 64)
    with profile() as recorded:
        batches = iter(DataLoader(Slow(), batch_size=1, num_workers=workers))
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                batch = next(batches)
                for _ in range(2):
                    # On one thread: on busy cores several wait for each other, while the worker loads ahead.
                    batch = batch * weight
    path = tmp_path / "trace_rank0.json"
    recorded.export_chrome_trace(str(path))
    findings = diagnosis_of("run", [facts_of(read_trace(path))]).findings
    # On busy cores a second one may follow, of little time between operators.
    longest = next(one for one in findings if one.cause == "host_bound")
    assert "of that time the host waits for a DataLoader's next batch" in longest.evidence
    assert advice in longest.try_
