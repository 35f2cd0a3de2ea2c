import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_sweep.backends.installed import attention_backend, attention_warnings

OTHERS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f1200000000-7f1200001000 rw-p 00000000 00:00 0
7f1300000000-7f1300001000 r-xp 00000000 08:01 132 /venv/lib/nvidia/cublas/lib/libcublas.so.13
7f1400000000-7f1400001000 r-xp 00000000 08:01 133 /venv/lib/transformer_engine/libtransformer_engine.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""
OF_TORCH = """\
7f2000000000-7f2000001000 r--p 00000000 08:01 200 /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f2000001000-7f2000002000 r-xp 00001000 08:01 200 /venv/lib/nvidia/cudnn/lib/libcudnn.so.9
7f2100000000-7f2100001000 r-xp 00000000 08:01 201 /venv/lib/nvidia/cudnn/lib/libcudnn_graph.so.9
7f2200000000-7f2200001000 r-xp 00000000 08:01 202 /venv/lib/nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9.19.0
"""
OF_SYSTEM = """\
7f3000000000-7f3000001000 r-xp 00000000 08:01 300 /usr/lib/x86_64-linux-gnu/libcudnn.so.9.10.2
"""
TORCHS, SYSTEMS = "/venv/lib/nvidia/cudnn/lib", "/usr/lib/x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("backend", "maps", "expected"),
    [
        *((backend, OTHERS + OF_TORCH, []) for backend in (None, "flash (2.8.3)", "fused (cuDNN 9.19.0)")),
        (None, OTHERS, []),
        ("fused (cuDNN 9.19.0)", OF_TORCH + OF_SYSTEM, [(TORCHS, SYSTEMS, "CUDNN_HOME")]),
        ("unfused", OTHERS + OF_TORCH, [("unfused", "NVTE_DEBUG=1")]),
        ("unfused", OF_TORCH + OF_SYSTEM, [("CUDNN_HOME",), ("NVTE_DEBUG=1",)]),
    ],
)
def test_every_reason_to_doubt_is_a_sentence_that_names_what_to_do(
    backend: str | None, maps: str, expected: list[tuple[str, ...]]
) -> None:
    warnings = attention_warnings(backend, maps)
    assert len(warnings) == len(expected)
    for warning, names in zip(sorted(warnings, key=lambda text: "NVTE_DEBUG" in text), expected, strict=True):
        assert all(name in warning for name in names)
        assert warning.endswith(".")
        assert "\n" not in warning


CHOSEN: dict[str, Any] = {
    "attention_params": object(),
    "use_flash_attention": False,
    "flash_attention_backend": "2.8.3",
    "use_fused_attention": False,
}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({"attention_params": None}, None),
        ({"use_flash_attention": True}, "flash (2.8.3)"),
        ({"use_fused_attention": True}, "fused (cuDNN 9.19.0)"),
        ({}, "unfused"),
    ],
)
def test_who_computed_attention(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], backend: str | None) -> None:
    parent = "transformer_engine.pytorch.attention.dot_product_attention"
    library = ModuleType(parent)
    library.dot_product_attention = SimpleNamespace(_attention_backends={**CHOSEN, **changes})  # type: ignore[attr-defined]
    # Whether or not Transformer Engine is installed, this is the one that is imported.
    for depth in range(1, parent.count(".") + 1):
        name = ".".join(parent.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent, library)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert attention_backend() == backend
