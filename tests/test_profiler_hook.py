"""The profiler's hook on real process groups: who reads the traces, what stays, and that nobody is kept waiting."""

import io
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import overlap_sweep
from overlap_sweep import profiler_hook
from overlap_sweep.measure import Ranks
from overlap_sweep.trace.kineto import read_trace
from tests.analyze import ROOT
from tests.processes import run_ranks

GRACE_S = 0.5
FINDINGS = re.compile(r"(?m)^  1\. \w+: ")


@dataclass
class Saw:
    """What one rank saw of a profile."""

    stdout: str
    stderr: str
    waited_s: float
    """In the hook, of all cycles."""


def test_the_package_has_it_and_imports_no_torch() -> None:
    code = (
        "import sys, overlap_sweep; overlap_sweep.diagnose_trace; print({'torch', 'numpy', 'pandas'} & {*sys.modules})"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert printed.stdout == "set()\n"


def profiled(ranks: Ranks, make: Callable[..., Any], *, cycles: int = 1, who: tuple[int, ...] = (0, 1)) -> Saw:
    """Trains three steps per cycle, with a profiler on some of the ranks."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    weight = torch.randn(128, 128, requires_grad=True)
    stdout, stderr, waited_s = io.StringIO(), io.StringIO(), 0.0

    def step() -> None:
        (torch.randn(64, 128) @ weight).sum().backward()
        dist.all_reduce(weight.grad)

    with redirect_stdout(stdout), redirect_stderr(stderr), warnings.catch_warnings():
        # torch's, that a cycle has only its own events.
        warnings.simplefilter("ignore")
        hook = make()

        def timed(profiler: Any) -> None:
            nonlocal waited_s
            start_s = time.monotonic()
            hook(profiler)
            waited_s += time.monotonic() - start_s

        profiler = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=3, repeat=cycles),
            on_trace_ready=timed,
        )
        if ranks.rank in who:
            profiler.start()
        for _ in range(4 * cycles):
            step()
            if ranks.rank in who:
                profiler.step()
        if ranks.rank in who:
            profiler.stop()
    return Saw(stdout.getvalue(), stderr.getvalue(), waited_s)


def temporary(ranks: Ranks, folder: Path) -> Saw:
    with mock.patch("tempfile.tempdir", str(folder)):
        return profiled(ranks, overlap_sweep.diagnose_trace)


def test_rank_0_prints_the_findings_of_all_ranks_and_no_trace_stays(tmp_path: Path) -> None:
    first, second = run_ranks(2, temporary, tmp_path, keep="profiled")
    assert FINDINGS.search(first.stdout)
    assert re.search(r"^\nProfiled steps \d+ to \d+\n  2 ranks, \d steps? of ", first.stdout)
    assert "No trace of rank" not in first.stderr
    assert "Only rank" not in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


def kept(ranks: Ranks, folder: Path) -> Saw:
    from torch.profiler import tensorboard_trace_handler

    tensorboard = tensorboard_trace_handler(str(folder / "log"), f"worker{ranks.rank}", use_gzip=ranks.rank == 0)
    return profiled(ranks, lambda: overlap_sweep.diagnose_trace(folder / "traces", also=tensorboard), cycles=2)


def test_traces_stay_in_the_directory_and_another_handler_gets_them_too(tmp_path: Path) -> None:
    first, second = run_ranks(2, kept, tmp_path, keep="profiled")
    assert (second.stdout, second.stderr) == ("", "")
    names = [f"{name}_rank{rank}.json.gz" for name in ("trace", "trace_cycle1") for rank in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(names)
    for name in ("trace", "trace_cycle1"):
        assert f"\n{tmp_path}/traces/{name}_rank*.json.gz\n  2 ranks, " in first.stdout
    copies = sorted((tmp_path / "log").iterdir())
    assert [path.name.partition(".")[0] for path in copies] == ["worker0", "worker0", "worker1", "worker1"]
    assert [path.suffix for path in copies] == [".gz", ".gz", ".json", ".json"]
    own = {len(read_trace(tmp_path / "traces" / name).host) for name in names}
    assert {len(read_trace(path).host) for path in copies} == own


def only_some(ranks: Ranks, who: tuple[int, ...]) -> Saw:
    # Made by those alone who have a profiler: no hooks made later would know each other.
    make = overlap_sweep.diagnose_trace if ranks.rank in who else lambda: None
    with mock.patch.object(profiler_hook, "SHORT_GRACE_S", GRACE_S):
        return profiled(ranks, make, cycles=2, who=who)


@pytest.mark.parametrize("who", [(0,), (1,)])
def test_a_rank_without_a_profiler_keeps_nobody_waiting_but_for_moments_once(who: tuple[int, ...]) -> None:
    saw = run_ranks(2, only_some, who)
    with_it, without = saw[who[0]], saw[1 - who[0]]
    assert (without.stdout, without.stderr) == ("", "")
    assert len(FINDINGS.findall(with_it.stdout)) == 2
    assert with_it.stderr.count(f"Rank {1 - who[0]} has no profiler with diagnose_trace().") == 2
    assert GRACE_S < with_it.waited_s < profiler_hook.WAIT_S


def never_written(ranks: Ranks) -> Saw:
    """Rank 1 makes the hook and has no profiler."""
    with mock.patch.object(profiler_hook, "WAIT_S", 1.0):
        return profiled(ranks, overlap_sweep.diagnose_trace, who=(0,))


def test_a_trace_that_does_not_come_is_named() -> None:
    first, _ = run_ranks(2, never_written, keep="profiled")
    assert FINDINGS.search(first.stdout)
    assert "warning: Rank 1 wrote no trace within 1 s." in first.stderr


def unseen(ranks: Ranks, folder: Path, directory: Path | None) -> Saw:
    """Rank 1 is on another host, whose files rank 0 does not see: another file has the name."""
    if ranks.rank == 1:
        own = folder / "node7" if directory else None
        hostname = mock.patch.object(socket, "gethostname", return_value="node7")
        with hostname, mock.patch("tempfile.tempdir", str(folder)):
            return profiled(ranks, lambda: overlap_sweep.diagnose_trace(own))

    def other_file(written: profiler_hook._Written) -> bool:
        written.digest = "0" * 64
        return is_here(written)

    is_here = profiler_hook._is_here
    here = mock.patch.object(profiler_hook, "_is_here", other_file)
    with here, mock.patch.object(profiler_hook, "SHARED_FILE_S", 0.1):
        return profiled(ranks, lambda: overlap_sweep.diagnose_trace(directory))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_trace_on_another_host_is_named_and_the_rest_diagnosed(tmp_path: Path, keeps: bool) -> None:
    first, second = run_ranks(2, unseen, tmp_path, tmp_path / "node0" if keeps else None, keep="profiled")
    assert FINDINGS.search(first.stdout)
    assert "The trace of rank 1 is on node7, not visible from here; " in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    stay = {tmp_path / f"node{node}" / f"trace_rank{rank}.json.gz" for node, rank in ((0, 0), (7, 1))}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == (stay if keeps else set())


def failing(ranks: Ranks, folder: Path) -> Saw:
    """Rank 0 cannot write its trace, and rank 1's other handler raises."""

    def broken(profiler: Any) -> None:
        raise KeyError("mine")

    directory = folder / "a_file" / "traces" if ranks.rank == 0 else folder
    return profiled(ranks, lambda: overlap_sweep.diagnose_trace(directory, also=broken if ranks.rank else None))


def test_what_goes_wrong_is_printed_and_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    first, second = run_ranks(2, failing, tmp_path, keep="profiled")
    assert "warning: The trace could not be written to " in first.stderr
    assert "1 step" in first.stdout or " steps of " in first.stdout
    assert "KeyError: 'mine'" in second.stderr
    assert "training continues" in second.stderr


def without_group(ranks: Ranks, world_size: int) -> Saw:
    """A program whose ranks use something else than torch.distributed."""
    environment = mock.patch.dict(os.environ, RANK=str(ranks.rank), WORLD_SIZE=str(world_size))
    with environment, mock.patch("torch.distributed.is_initialized", return_value=False):
        return profiled(ranks, overlap_sweep.diagnose_trace)


def test_without_a_process_group_rank_0_diagnoses_its_own_trace() -> None:
    first, second = run_ranks(2, without_group, 2, keep="profiled")
    assert FINDINGS.search(first.stdout)
    assert "torch.distributed is not initialized" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")


def test_a_single_process_needs_no_group_and_a_profile_without_steps_is_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=overlap_sweep.diagnose_trace(tmp_path)):
        for _ in range(3):
            (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).sum().backward()
    printed = capsys.readouterr()
    assert f"{tmp_path}/trace_rank0.json.gz" in printed.out
    assert " none: " in printed.out
    assert "error" not in printed.err


def test_an_empty_profile_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=overlap_sweep.diagnose_trace()):
        pass
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: .+\n", printed.err)


def test_a_store_that_is_gone_is_said_and_waited_for_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone:
        def check(self, *given: object) -> bool:
            raise RuntimeError("Connection reset by peer\nat socket.cpp")

        set = check

    messages = profiler_hook._Messages(Gone(), "x")
    messages.send("a", "b")
    start_s = time.monotonic()
    assert messages.wait(["a", "b"], 60) == {}
    assert time.monotonic() - start_s < 30
    line = "warning: The ranks cannot exchange where their traces are (Connection reset by peer).\n"
    assert capsys.readouterr().err == 2 * line
