"""Whether settings compute the same: trainings of two ranks in which levers change nothing, the order of sums, or what
is learnt; and losses that a command prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import levers
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import PointFailed
from overlap_sweep.recorder.recording import TrainingState
from overlap_sweep.workloads import analyse
from overlap_sweep.workloads.job.config import Job
from overlap_sweep.workloads.job.output import printed_losses
from tests import start_ranks
from tests.make_point import job_config, make_point
from tests.workloads.job.commands import job, measured

TRAIN = """
import sys
import torch
import torch.distributed as dist
import overlap_sweep

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if len(sys.argv) == 1:
    torch.manual_seed(1 + dist.get_rank())
else:
    torch.seed()
for step in range(10**6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    overlap_sweep.step(loss)
"""
LEVERS = """
test.view:
  what: gradients as views of buckets
  values: [true]
  kind: boolean
  results: exact
  constructor: {of: ["torch.nn.parallel.distributed:DistributedDataParallel"], argument: gradient_as_bucket_view}
  write: DistributedDataParallel(model, gradient_as_bucket_view={value})
test.lr:
  what: another learning rate
  values: [0.2]
  kind: number
  results: trains differently
  constructor: {of: ["torch.optim.sgd:SGD"], argument: lr}
  overrides: true
  write: SGD(parameters, lr={value})
"""


@pytest.fixture
def _levers_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "package"
    (package / "more_levers-1.0.dist-info").mkdir(parents=True)
    (package / "more_levers-1.0.dist-info" / "METADATA").write_text("Name: more-levers\nVersion: 1.0\n")
    (package / "more_levers-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{levers.GROUP}]\ntest = more_levers:path\n"
    )
    (package / "more_levers.py").write_text(f"def path(): return {str(package / 'levers.yaml')!r}\n")
    (package / "levers.yaml").write_text(LEVERS)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.syspath_prepend(package)
    levers.levers.cache_clear()
    yield
    levers.levers.cache_clear()


def train(folder: Path, chosen: dict[str, Any], repetition: int = 0, argument: str = "") -> None:
    """Measures a setting, and writes what was recorded as a point of half a second less for each lever."""
    (folder / "train.py").write_text(TRAIN)
    command = f"{sys.executable} {start_ranks.__file__} {{ranks}} {folder}/train.py"
    options = {"ranks": 2, "skip_steps": 5, "steps": 3, "profile_steps": 0, "attach": True, "levers": chosen}
    run = job(measured(folder, f"{command} {argument}", 120.0, **options))
    assert run.state
    assert run.state.loss is not None
    point = job_config(**{"job.levers": chosen, "repetition": repetition, "runtime.device": "cpu"})
    started = f"2026-11-20T21:{len(list((folder / 'sweep').glob('*'))):02}:00+00:00"
    make_point("job", folder / "sweep", point, step_us=1e6 - 1e5 * len(chosen), state=run.state, started=started)


@pytest.mark.end_to_end
@pytest.mark.usefixtures("_levers_of_another_package")
def test_levers_compute_what_they_declare(tmp_path: Path) -> None:
    view, lr = {"view": True}, {"lr": 0.2}
    settings: list[dict[str, Any]] = [{}, {}, {"test": view}, {"ddp": {"bucket_cap_mb": 0.01}}, {"test": lr}]
    for number, chosen in enumerate(settings):
        train(tmp_path, chosen, repetition=number % 2)

    (answer,) = analyse(tmp_path / "sweep", AnalysisConfig()).sections[0].answers

    found = {row.setting: row.equality.verdict for row in answer.compared.rows}
    assert found.pop("ddp.bucket_cap_mb=0.01") in ("equal", "rounding")
    assert found == {"defaults": "equal", "test.view=true": "equal", "test.lr=0.2": "differs"}
    differing, declared = answer.cautions[:2]
    assert "test.lr=0.2: " in differing
    assert "view" not in differing
    assert declared.startswith("Made to train differently: job.levers.test.lr=0.2.")


@pytest.mark.end_to_end
def test_of_a_training_without_a_seed_nothing_is_said_but_that(tmp_path: Path) -> None:
    for repetition in range(2):
        train(tmp_path, {}, repetition, "random")
    train(tmp_path, {"ddp": {"bucket_cap_mb": 0.01}}, argument="random")

    (answer,) = analyse(tmp_path / "sweep", AnalysisConfig()).sections[0].answers

    assert {row.equality.verdict for row in answer.compared.rows} == {"unknown"}
    assert "its own runs differ" in answer.cautions[0]


STATE = {
    **{"step": 5, "is_short": True, "gradients_norm": 1.0, "gradients_sum": 0.26, "layout": "a"},
    **{"signed_sums": [0.5, -0.8], "parameters_norm": 235.0, "parameters_sum": 18936.0},
}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "equal"),
        # As of nanoGPT with compiled blocks, and with other tokens, whose plain sum and norm are as near.
        ({"gradients_sum": 0.19, "signed_sums": [0.52, -0.79]}, "rounding"),
        ({"gradients_sum": 0.2601, "signed_sums": [-0.7, -0.8]}, "differs"),
        ({"signed_sums": [0.5, "not finite"]}, "differs"),
        # Of gradients of other sizes signs say nothing.
        ({"signed_sums": [-0.7, 0.9], "layout": "b"}, "equal"),
        # A plain sum is all there is of parameters.
        ({"parameters_sum": 18936.0 + 235 * 0.0013}, "rounding"),
        ({"parameters_sum": 18936.0 + 235 * 0.0015}, "differs"),
    ],
)
def test_what_a_setting_computed_is_compared_number_by_number(
    tmp_path: Path, changes: dict[str, Any], verdict: str
) -> None:
    for number, (chosen, state) in enumerate([({}, STATE), ({}, STATE), ({"ddp": {"no_sync": True}}, STATE | changes)]):
        point = job_config(**{"job.ranks": 2, "job.levers": chosen, "repetition": number})
        make_point("job", tmp_path, point, state=TrainingState(**state), started=f"2026-11-20T21:0{number}:00+00:00")

    (answer,) = analyse(tmp_path, AnalysisConfig()).sections[0].answers

    assert {row.equality.verdict for row in answer.compared.rows if row.options} == {verdict}


@pytest.mark.parametrize(
    ("printed", "losses"),
    [
        ("step 1 loss: 4.5\nstep 2 loss: 1,234.25\nloss: 3\nloss: 2", ["4.5", "1234.25", "3"]),
        ("loss: 4\rloss: 3\rloss: 2\n", ["4", "3", "2"]),
        ("[rank1]: loss: 4\n[rank0]: loss: 7\n[rank1]: loss: \x1b[1m3\n", ["4", "3"]),
        ("nothing", []),
    ],
)
def test_losses_are_the_first_that_one_rank_printed(tmp_path: Path, printed: str, losses: list[str]) -> None:
    log = tmp_path / "log"
    log.write_text(f"loss: 9\n{printed}")
    one = Job(command="", loss="loss: ([0-9.]+)", skip_steps=3)
    assert printed_losses(one, {log: len("loss: 9\n")}) == losses


def test_a_loss_that_is_no_number_fails_the_point(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("loss: high")
    with pytest.raises(PointFailed, match="found 'high', which is no number"):
        printed_losses(Job(command="", loss="loss: (.+)"), {tmp_path / "log": 0})


def test_a_loss_that_is_not_printed_is_a_warning(tmp_path: Path) -> None:
    script = "import torch\np = torch.nn.Parameter(torch.ones(2))\no = torch.optim.SGD([p], lr=0.1)\n"
    (tmp_path / "t.py").write_text(f"{script}for _ in range(9): p.sum().backward(); o.step(); print('loss 4.25')\n")
    command = f"{sys.executable} {tmp_path}/t.py"
    options = {"attach": True, "profile_steps": 0, "skip_steps": 2}

    found = measured(tmp_path, command, loss="loss ([0-9.]+)", **options)
    assert job(found).losses == ["4.25", "4.25"]
    assert found["warnings"] == []
    found = measured(tmp_path, command, loss="nll ([0-9.]+)", **options)
    assert found["warnings"] == ["job.loss=nll ([0-9.]+) was not found in the command's output."]
