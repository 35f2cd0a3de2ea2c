"""Megatron-Core on real GPUs: Transformer Engine's layers, however their communication overlaps, train alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from overlap_sweep.backends import transformer_engine
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, text
from tests.processes import run_ranks
from tests.tp_training.points import tp_point
from tests.tp_training.whole_model import Trained, train_points

pytestmark = [
    pytest.mark.skipif(bool(transformer_engine.missing(package)), reason=f"needs {package}")
    for package in ("transformer_engine", "megatron.core")
]

SMALL = (
    *("impl=megatron", "runtime.device=cuda", "tp_training.dtype=bfloat16", "model.hidden_size=1024"),
    *("model.ffn_hidden_size=2048", "model.num_attention_heads=8", "model.num_kv_heads=4", "model.head_dim=128"),
    *("model.num_layers=2", "tp_training.seq_length=512", "tp_training.learning_rate=0.0001"),
)
WITHOUT_SEQUENCE = "tp_training.sequence_parallel=false"
TUNED = OverlapConfig(
    {
        "proj_fprop": {"method": "pipeline", "num_sm": 16, "cga_size": 2, "num_splits": 4, "set_sm_margin": True},
        "fc1_dgrad": {"method": "bulk", "num_sm": 4, "cga_size": 2, "set_sm_margin": False},
        "fc2_dgrad": {"method": "ring_exchange", "aggregate": False},
    },
    {**SWITCH_DEFAULTS, "tp_comm_overlap_disable_qkv": True},
)
ASKED = {
    "default": (),
    "off": ("tp_training.tp_comm_overlap=false",),
    "whole sequence": (WITHOUT_SEQUENCE,),
    "checkpointed": ("tp_training.activation_checkpointing=true",),
    "accumulated": ("tp_training.gradient_accumulation_steps=2",),
    "accumulated, whole sequence": ("tp_training.gradient_accumulation_steps=2", WITHOUT_SEQUENCE),
    "frozen": ("tp_training.learning_rate=0",),
    "fsdp_dtensor": ("impl=fsdp_dtensor",),
    "float32": ("tp_training.dtype=float32", "tp_training.tp_comm_overlap=false"),
    "float16": ("tp_training.dtype=float16", "tp_training.tp_comm_overlap=false"),
}
REPLICAS = ("tp_size=1", "dp_size=2")
DTYPES = ("bfloat16", "float32", "float16")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "tp_comm_overlap_cfg.yaml"
    path.write_text(text(TUNED))
    return path


@cache
def trained(tuned: Path) -> list[dict[str, Trained]]:
    """One after the other in the same processes, with other userbuffers or none."""
    cases = {**ASKED, "tuned": (f"tp_training.tp_comm_overlap_cfg={tuned}",), "default again": ()}
    cases |= {f"replicated {dtype}": (*REPLICAS, f"tp_training.dtype={dtype}") for dtype in DTYPES}
    points = {name: tp_point(*SMALL, *overrides) for name, overrides in cases.items()}
    found: list[dict[str, Trained]] = run_ranks(
        2, train_points, points, device="cuda", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    )
    return found


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        *((name, "whole sequence") for name in ("default", "off", "checkpointed", "tuned", "default again")),
        *((name, "fsdp_dtensor") for name in ("default", "float32", "float16")),
        ("accumulated", "accumulated, whole sequence"),
    ],
)
def test_losses_agree(name: str, reference: str, tuned: Path) -> None:
    first, second = trained(tuned)
    assert first[name].losses == pytest.approx(first[reference].losses, rel=1e-2)
    assert first[name].norms == pytest.approx(first[reference].norms, rel=5e-2)
    assert first[name].losses == second[name].losses


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_replicas_train_as_in_float32(name: str, tuned: Path) -> None:
    first, second = ({dtype: of_rank[f"replicated {dtype}"] for dtype in DTYPES} for of_rank in trained(tuned))
    for of_rank in (first, second):
        assert of_rank[name].losses == pytest.approx(of_rank["float32"].losses, rel=1e-2)
        assert of_rank[name].norms == pytest.approx(of_rank["float32"].norms, rel=5e-2)
    assert first[name].details["optimizer"] == "distributed"
    assert first[name].losses != second[name].losses


@pytest.mark.gpu(count=2)
def test_steps_are_taken(tuned: Path) -> None:
    found = trained(tuned)[0]
    pairs = list(zip(found["default"].losses, found["frozen"].losses, strict=True))
    assert pairs[0][0] == pairs[0][1]
    assert all(loss < frozen - 1e-3 for loss, frozen in pairs[1:])


@pytest.mark.gpu(count=2)
def test_the_facts_say_who_overlaps_and_who_attends(tuned: Path) -> None:
    found = trained(tuned)[0]
    overlaps = {name: found[name].details["tp_comm_overlap"] for name in ("default", "off", "whole sequence", "tuned")}
    assert overlaps == {
        "default": "Transformer Engine's defaults",
        "off": "off",
        "whole sequence": "off",
        "tuned": str(tuned),
    }
    assert found["default"].details["attention_backend"].startswith(("flash", "fused"))
    assert found["default"].warnings == []
