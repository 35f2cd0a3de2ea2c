"""What every training run must do, in one pair of processes. The rest is in test_training_runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import losses, telemetry, train


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = losses(train(tmp_path / "alone", 1, run=["training.batch_size=4"]))["run"]
    found = train(tmp_path, 2, fsdp2=["fsdp.forward_prefetch=true"], ddp=["distributed.strategy=ddp"])
    for name in ("fsdp2", "ddp"):
        assert losses(found)[name] == pytest.approx(alone, rel=1e-5)
        assert list(found[name]["training"].step) == ["point", "none", "floor"]
    assert alone[0] != pytest.approx(alone[-1], rel=1e-2)
    kinds = {name: {kind for kind, ms in telemetry(tmp_path / name)[-1].streams_ms.items() if ms} for name in found}
    # FSDP2's all-reduce is of the gradients' norm.
    fsdp2 = {"compute", "all_reduce", "reduce_scatter", "auxiliary"}
    assert kinds == {"fsdp2": fsdp2, "ddp": {"compute", "all_reduce"}}
