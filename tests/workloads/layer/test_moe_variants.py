"""What Megatron-Core is given for each way of experts to communicate, and when it cannot be had."""

from dataclasses import fields
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from overlap_sweep.workloads.layer import moe
from overlap_sweep.workloads.layer.moe import VARIANTS, arguments, megatron_arguments, variant_refusal
from tests.make_point import layer_point


def point(device: str = "cuda", precision: str = "bf16", shared: int | None = 64, **options: int | None) -> Any:
    moe = {"ep_size": 2, "micro_batches": 2, "num_sm": None, **options}
    model = {"shared_expert_ffn_hidden_size": shared}
    return layer_point(device=device, precision=precision, model=model, layer={"moe": moe})


def test_every_argument_is_one_of_megatron_cores() -> None:
    known = {field.name for field in fields(TransformerConfig)}
    for name in VARIANTS:
        assert set(arguments(name, 8)) <= known


@pytest.mark.parametrize(("num_sm", "given"), [(None, 20), (24, 24)])
def test_only_deepep_has_a_number_of_sms(num_sm: int | None, given: int) -> None:
    found = {name: arguments(name, num_sm).get("moe_deepep_num_sms") for name in VARIANTS}
    assert found == {name: given if "deepep" in name else None for name in VARIANTS}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, {"deepep", "deepep_micro_batches"}),
        ({"device": "cpu"}, {"deepep", "deepep_micro_batches"}),
        ({"precision": "fp32"}, {"micro_batches", "deepep", "deepep_micro_batches"}),
        ({"micro_batches": 1}, {"micro_batches", "deepep", "deepep_micro_batches"}),
        ({"shared": None}, {"shared_experts", "deepep", "deepep_micro_batches"}),
        ({"ep_size": 1}, set(VARIANTS) - {"none"}),
    ],
)
def test_variants_that_cannot_run_here(
    changes: dict[str, Any], refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "find_spec", lambda name: None)
    assert {name for name in VARIANTS if variant_refusal(name, point(**changes))} == refused


def test_deepep_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "find_spec", lambda name: object())
    assert variant_refusal("deepep_micro_batches", point(num_sm=24)) is None
    assert "even" in str(variant_refusal("deepep", point(num_sm=7)))


def test_megatron_lms_arguments() -> None:
    assert megatron_arguments(arguments("deepep_micro_batches", 24), ep_size=8) == [
        "--expert-model-parallel-size 8",
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend deepep",
        "--overlap-moe-expert-parallel-comm",
        "--moe-deepep-num-sms 24",
    ]
