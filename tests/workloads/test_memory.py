"""Estimated memory against what processes really take, and who is refused or warned by it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_sweep import workloads
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from overlap_sweep.runtime import point as runtime_point
from overlap_sweep.runtime import worker
from overlap_sweep.workloads import memory
from tests.composed import composed
from tests.processes import run_ranks

SIZED = (
    *("runtime.device=cpu", "profile=none", "model.hidden_size=512", "model.ffn_hidden_size=2048"),
    *("model.num_attention_heads=8", "model.num_kv_heads=8", "model.head_dim=64"),
)
STACK = (
    *("workload=tp_training", *SIZED, "model.num_layers=4", "model.vocab_size=4000", "tp_training.warmup_steps=0"),
    *("tp_training.num_training_steps=2", "tp_training.seq_length=256", "tp_size=1"),
)
FSDP = (
    *("workload=fsdp", *SIZED, "ranking.num_layers=4", "ranking.vocab_size=200", "training.max_steps=2"),
    *("workload.repeats=3", "workload.steps=1", "workload.warmup=0", "training.batch_size=8", "distributed.dp_size=1"),
)
LAYER = ("workload=layer", *SIZED, "tp_size=1", "workload.tokens=256", "workload.repeats=3", "layer.training=true")


def _peak_bytes(ranks: Ranks, point: dict[str, Any], directory: Path) -> int:
    """What this process takes at most while it runs the point, beyond what it took before."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    clear.write_text("5")

    def kb(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    before = kb("VmRSS")
    run = workloads.of(point).run
    assert run
    run(point, directory, ranks)
    return 1024 * (kb("VmHWM") - before)


LIBRARIES_BYTES = 150e6
"""What libraries take for themselves while they compute: buffers of GEMMs, threads, autograd's graph."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("asked", [STACK, FSDP, LAYER], ids=["tp_training", "fsdp", "layer"])
def test_an_estimate_is_near_what_a_rank_takes(asked: tuple[str, ...], tmp_path: Path) -> None:
    point = composed(*asked)
    estimate = workloads.of(point).memory(point)
    assert estimate
    (measured,) = run_ranks(1, _peak_bytes, point, tmp_path)
    assert 0.95 * estimate.total < measured < 1.2 * estimate.total + LIBRARIES_BYTES
    assert estimate.total > 0.5 * measured


def test_what_cannot_hold_its_parameters_is_refused_and_what_may_not_fit_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = composed("workload=tp_training", "runtime.device=cpu", "model=llama3_8b")
    assert runtime_point._memory_refusal(composed("workload=tp_training", "runtime.device=cpu")) is None
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(memory, "host_bytes", lambda: int(64.3e9))
    assert runtime_point._memory_refusal(point) is None
    warned = capsys.readouterr().err
    assert re.fullmatch(r"warning: llama3_8b may run out of memory: about [\d.]+ GB are needed, and .*\n", warned)
    assert "this machine has 64.3 (in GB, each of 2 ranks: parameters 32.1, gradients 16.1, optimizer 32.1," in warned
    assert "); if it fails, use fewer layers (model.num_layers), a larger tp_size or a smaller model\n" in warned
    monkeypatch.setattr(memory, "host_bytes", lambda: int(64.1e9))
    result = runtime_point.measure(point, tmp_path)
    assert result.status == "skipped"
    assert result.reason.startswith(
        "the parameters of 2 ranks alone need 64.2 GB, and this machine has 64.1; use fewer"
    )


@pytest.mark.parametrize(("share_of", "share", "said"), [("parameters", 0.9, None), ("total", 0.9, 1), ("total", 1, 0)])
def test_a_rank_looks_at_its_own_gpu(
    share_of: str, share: float, said: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = composed("workload=fsdp", "runtime.device=cpu", "model=llama3_8b")
    total_memory = share * getattr(workloads.of(point).memory(point), share_of)
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=total_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    ranks = Ranks(0, 2, torch.device("cuda", 0))
    if said is None:
        with pytest.raises(Refused, match=r"^the parameters alone need .* GB, and NVIDIA H200 has "):
            worker._check_memory(point, ranks)
        return
    warned = worker._check_memory(point, ranks)
    assert [text.partition(":")[0] for text in warned] == ["This point may run out of memory"] * said
    assert capsys.readouterr().out.count("warning: may run out of memory") == said
