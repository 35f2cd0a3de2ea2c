"""Steps on a CPU that wait for their data, and an optimizer's part of them, profiled for real."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, Dataset

from overlap_sweep.predict.predictions import Prediction
from overlap_sweep.predict.runs import predictions_of

WAITS_S = 0.04


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(WAITS_S)
        return torch.ones(64, 64)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Prediction]]:
    """A step that is whole, as a recording with few of them has, after one that has the profiler's start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(Slow(), batch_size=1))
    with profile() as recording:
        for number in range(2):
            with record_function(f"ProfilerStep#{number}"):
                model(next(batches)).sum().backward()
                optimizer.step()
    path = tmp_path_factory.mktemp("recorded") / "trace_rank0.json"
    recording.export_chrome_trace(str(path))
    yield {one.change: one for one in predictions_of([path], ["loader.ready=true", "optimizer.step=none"])}
    torch.set_num_threads(threads)


def test_the_wait_before_the_first_step_belongs_to_it(recorded: dict[str, Prediction]) -> None:
    found = recorded["loader.ready=true"]
    assert found.status == "predicted", found.reason
    assert found.gain_us is not None
    assert found.gain_us > 0.95e6 * WAITS_S
    assert found.step_us > found.gain_us


def test_an_optimizer_s_step_gains_at_most_its_time(recorded: dict[str, Prediction]) -> None:
    found = recorded["optimizer.step=none"]
    assert found.status == "bound"
    assert found.gain_us is not None
    assert 0 < found.gain_us < found.step_us - 0.95e6 * WAITS_S
