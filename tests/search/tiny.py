"""A model so small that a point of it takes a moment, and launch.py's arguments for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.sweeps import ROOT

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
}
SIZES = (
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=32",
)
"""The same without Hugging Face, whose reader alone takes seconds."""
QUICK = ("runtime.device=cpu", "workload.tokens=64", "workload.repeats=3", "profile=none")


def write_config(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def arguments(model: Path) -> tuple[str, ...]:
    return ("model=hf", f"model.name={model}", *QUICK)


def analyze_py(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "analyze.py", str(directory)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def assert_one_error(done: subprocess.CompletedProcess[str], says: str) -> None:
    """One line, no traceback, and no success."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
