"""A training whose pauses are levers of a package of their own, and the command that optimizes it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlap_sweep import levers
from overlap_sweep.program import environment_with_package

TRAIN = """
import os, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    time.sleep(float(os.environ.get("A_MS", "30")) / 1e3)
    optimizer.step()
"""
LEVERS = """
test.a_ms: {what: a pause, values: [90, 10], results: exact, environment: A_MS}
test.b_ms: {what: nothing, values: [1], results: rounding, environment: B_MS}
test.lr:
  what: another learning rate
  values: [0.2]
  kind: number
  results: exact
  constructor: {of: ["torch.optim.sgd:SGD"], argument: lr}
  overrides: true
  write: SGD(parameters, lr={value})
test.workers:
  what: workers of what the training does not have
  values: [2, 3]
  results: exact
  constructor: {of: ["torch.utils.data.dataloader:DataLoader"], argument: num_workers}
  write: DataLoader(num_workers={value})
"""
QUICK = ("runtime.device=cpu", "search.repeats=2", "job.skip_steps=2", "job.steps=6", "job.profile_steps=1")


def written(folder: Path) -> Path:
    """Writes the training, train.py, and returns a folder for PYTHONPATH in which those levers are."""
    package = folder / "package"
    (package / "more_levers-1.0.dist-info").mkdir(parents=True, exist_ok=True)
    (package / "more_levers-1.0.dist-info" / "METADATA").write_text("Name: more-levers\nVersion: 1.0\n")
    (package / "more_levers-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{levers.GROUP}]\ntest = more_levers:path\n"
    )
    (package / "more_levers.py").write_text(f"def path(): return {str(package / 'levers.yaml')!r}\n")
    (package / "levers.yaml").write_text(LEVERS)
    (folder / "train.py").write_text(TRAIN)
    return package


def optimizing(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] = os.environ,
    command: Sequence[str] = (sys.executable, "train.py"),
) -> subprocess.Popen[str]:
    """Starts to optimize the training that `written` has written there, into the folder `found`."""
    search_path = os.pathsep.join(filter(None, (str(written(folder)), environment.get("PYTHONPATH"))))
    words = ["optimize", "--levers=test", "--output=found", *options, *QUICK, "--", *command]
    return subprocess.Popen(
        [sys.executable, "-m", "overlap_sweep", *words],
        cwd=folder,
        env=environment_with_package({**environment, "COLUMNS": "120", "PYTHONPATH": search_path}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
