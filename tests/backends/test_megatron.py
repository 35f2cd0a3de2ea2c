from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep.backends import megatron
from tests.points import gpu_point


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Have exactly these be there."""
    reasons = {name: f"{name} is not installed" for name in {"transformer_engine", "megatron.core"} - set(packages)}
    monkeypatch.setattr(megatron, "missing", lambda package="transformer_engine": reasons.get(package))


def point(**changes: Any) -> dict[str, Any]:
    return gpu_point(backend="megatron", **changes)


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ((), "transformer_engine is not installed"),
        (("megatron.core",), "transformer_engine is not installed"),
        (("transformer_engine",), "megatron.core is not installed"),
        (("transformer_engine", "megatron.core"), None),
    ],
)
def test_both_packages_are_needed(monkeypatch: pytest.MonkeyPatch, packages: tuple[str], reason: str | None) -> None:
    install(monkeypatch, *packages)
    assert megatron.refusal(point()) == reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"runtime": {"device": "cpu"}}, "backend=megatron needs GPUs"),
        ({"precision": "fp32"}, "backend=megatron has no precision=fp32"),
        ({"method": "ring_exchange", "atomic_gemm": True}, "FP8 GEMMs only"),
    ],
)
def test_what_userbuffers_refuse_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    install(monkeypatch, "transformer_engine", "megatron.core")
    assert says in str(megatron.refusal(point(**changes)))
