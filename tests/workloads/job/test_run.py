"""From a command to a point's result, or to the reason why there is none."""

import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.recorder.recording import RECORD_VARIABLE, STEPS_FILE, wanted_from
from overlap_sweep.results.run_directory import LOG_FILE
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import run as job_run
from overlap_sweep.workloads.job.output import ending, first_error
from overlap_sweep.workloads.job.run import run
from tests.workloads.job.commands import failure, job, job_point, measured, recorded, recording, shell

LONG = "sleep 600"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "POLL_S", 0.02)


def test_the_mean_of_the_rank_that_is_slowest_in_all_counts_and_the_command_is_ended(tmp_path: Path) -> None:
    ranks = (
        recording(0, 2, peak_memory_gb=None, environment={"torch": "2.13"}),
        recording(1, 2, host_us=[99.0, 111.0, 90.0, 109.0], environment={"torch": "other"}),
    )
    began = time.monotonic()
    found = measured(tmp_path, shell(f"{recorded(tmp_path / 'made', *ranks)}; {LONG}"), ranks=2)
    assert time.monotonic() - began < 60
    step = job(found).step
    assert step.samples_us == [99.0, 111.0, 90.0, 109.0]
    assert (step.q1_us, step.median_us, step.q3_us) == (96.75, 104.0, 109.5)
    assert (job(found).timed_by, job(found).calls_per_step, job(found).peak_memory_gb) == ("host", 1, None)
    assert (found["objective_us"], found["environment"]) == (102.25, {"torch": "2.13"})
    assert (found["warnings"], found["traces"]) == ([], [])


def test_gpus_clocks_count_if_all_ranks_have_them(tmp_path: Path) -> None:
    gpu = {"device": "cuda", "gpu_us": [50.0, 51.0, 52.0, 53.0], "peak_memory_gb": 3.0}
    both = [recording(0, 2, **gpu), recording(1, 2, **gpu | {"peak_memory_gb": 4.0})]
    found = measured(tmp_path, shell(recorded(tmp_path / "made", *both)), ranks=2, runtime={"device": "cuda"})
    assert (job(found).step.median_us, job(found).timed_by, job(found).peak_memory_gb) == (51.5, "gpu", 4.0)
    assert found["warnings"] == []
    one = [both[0], recording(1, 2, device="cuda", problems=["The GPU's times are lost."])]
    found = measured(tmp_path, shell(recorded(tmp_path / "made", *one)), ranks=2)
    assert (job(found).step.median_us, job(found).timed_by) == (101.5, "host")
    problem, device = found["warnings"]
    assert (device.startswith("runtime.device=cpu, but ranks 0, 1 "), problem) == (
        True,
        "Rank 1: The GPU's times are lost.",
    )


@pytest.mark.parametrize("option", ["samples_per_step", "tokens_per_step"])
def test_settings_are_compared_by_work(tmp_path: Path, option: str) -> None:
    command = shell(f"{recorded(tmp_path / 'made', recording())}; : {{batch}}")
    found = measured(tmp_path, command, values={"batch": 4}, **{option: "{batch} * 2.5"})
    assert getattr(job(found), option) == 10.0
    assert found["objective_us"] == 10.15


def test_an_earlier_attempt_s_recordings_are_not_read(tmp_path: Path) -> None:
    command = shell(f"test ! -e {{run}}/job_rank0.json && {recorded(tmp_path / 'made', recording())}")
    measured(tmp_path, command)
    assert (tmp_path / "run" / "job_rank0.json").exists()
    measured(tmp_path, command)


SPLITS = """
import os, sys

# As programs parse their arguments.
(_, out), folder = sys.argv[1].split("="), os.environ["OUT"]
os.makedirs(out)
assert os.path.samefile(out, folder + "/o") and "=" not in folder
open("in_working_folder", "x")
assert "=" not in os.popen("pwd").read()
print("tps: 5\\n" * 5, flush=True)
"""


def test_a_command_that_parses_its_arguments_writes_into_its_run_directory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPLITS)
    point = job_point(
        *(f"{sys.executable} -I -S {tmp_path}/train.py --out={{run}}/o {{b}}",),
        **{"directory": "{run}", "env": {"OUT": "{run}"}, "values": {"b": 4}, "metric": "tps: ([0-9]+)"},
    )
    before = tmp_path / "before"
    for name in ("t.py_b=4_é", "t.py_b=4_e", "safe"):
        directory = before / name
        directory.mkdir(parents=True)
        run(point, directory, Here(environment=os.environ, limit_s=30.0))
        assert {path.name for path in directory.iterdir()} == {"o", "in_working_folder", LOG_FILE}
    assert len(list((before / ".run").iterdir())) == 2
    # Links go on leading to the same after a sweep was moved.
    moved = before.rename(tmp_path / "after") / "t.py_b=4_e"
    (moved / "o").rmdir()
    (moved / "in_working_folder").unlink()
    run(point, moved, Here(environment=os.environ, limit_s=30.0))
    assert len(list((tmp_path / "after" / ".run").iterdir())) == 2


def test_a_command_that_is_to_finish_is_waited_for(tmp_path: Path) -> None:
    record = recorded(tmp_path / "made", recording())
    measured(tmp_path, shell(f"{record}; sleep 0.5; touch {tmp_path}/finished"), finish=True)
    assert (tmp_path / "finished").exists()
    assert "exit status 4" in str(failure(tmp_path, shell(f"{record}; sleep 0.3; exit 4"), finish=True))
    # Otherwise what comes after the last measured step does not count.
    assert job(measured(tmp_path, shell(f"{record}; exit 4")))


def test_a_script_that_ends_early_may_have_enough(tmp_path: Path) -> None:
    early = "The script ended after 3 of 4 timed steps (1 are skipped)."
    ranks = [recording(0, 2, host_us=[100.0] * 3, problems=[early]), recording(1, 2, host_us=[101.0] * 4)]
    found = measured(tmp_path, shell(recorded(tmp_path / "made", *ranks)), ranks=2)
    assert (job(found).step.samples_us, found["warnings"]) == ([101.0] * 3, [f"Rank 0: {early}"])
    ranks[0] = recording(0, 2, host_us=[100.0] * 2)
    failed = failure(tmp_path, shell(recorded(tmp_path / "made", *ranks)), ranks=2)
    assert failed.final
    assert "only 2 timed steps of 4" in str(failed)
    # A crash is one, however many steps were timed.
    ranks[0] = recording(0, 2, host_us=[100.0] * 3)
    failed = failure(tmp_path, shell(f"{recorded(tmp_path / 'made', *ranks)}; exit 9"), ranks=2)
    assert (failed.final, "exit status 9" in str(failed)) == (False, True)


UNMEASURED: list[tuple[str, dict[str, Any], str, bool]] = [
    ("true", {"directory": "no/such"}, "job.directory=no/such", True),
    ("true", {}, "-m overlap_sweep.attach", True),
    ("true", {"attach": True}, "-m overlap_sweep.attach", True),
    ("true", {"metric": "tps: ([0-9.]+)"}, "job.metric=tps: ([0-9.]+) was not found", True),
    (f"{sys.executable} -c pass", {"attach": True}, "overlap_sweep.step()", True),
    (shell(f"{{one_of_four}}; {LONG}"), {"ranks": 2}, "4 training processes, but job.ranks=2", True),
    (shell(f"echo 4 1 > {{run}}/{STEPS_FILE}; {LONG}"), {"ranks": 2}, "4 training processes, but job.ranks=2", True),
    (shell("{one_of_two}"), {"ranks": 2}, "only ranks [1] of 2", False),
    (shell(f"echo x > {{run}}/job_rank0.json; {LONG}"), {}, "job_rank0.json cannot be read", False),
    (shell("exit 3"), {}, "the command ended with exit status 3", False),
    (shell("kill -9 $$"), {}, "the command was killed by SIGKILL, perhaps for lack of memory", False),
    (shell("kill -s SEGV $$"), {}, "the command was killed by SIGSEGV", False),
    (shell("exit 137"), {}, "the command ended with exit status 137 (SIGKILL), perhaps for lack of memory", False),
    (shell("exit 255"), {}, "the command ended with exit status 255", False),
]


@pytest.mark.parametrize(("command", "changes", "reason", "final"), UNMEASURED)
def test_why_nothing_was_measured(
    tmp_path: Path, command: str, changes: dict[str, Any], reason: str, final: bool
) -> None:
    for name, world_size in (("{one_of_four}", 4), ("{one_of_two}", 2)):
        if name in command:
            command = command.replace(name, recorded(tmp_path / "made", recording(1, world_size)))
    failed = failure(tmp_path, command, **changes)
    assert reason in str(failed)
    assert (failed.final, failed.timed_out) == (final, False)


def test_a_full_disk_is_the_reason_whatever_the_log_says_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the log is on it, too, it ends before the error."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    said = str(failure(tmp_path, shell("echo step 7; exit 1")))
    assert said.startswith(f"there is no space left in {tmp_path}/run; free some, or give another directory: the ")


SAYS = """
import sys, warnings

warnings.warn("an old name")
print("loading")
for rank in range(2):
    print(f"[rank{rank}]: Unable to locate sufficient 2 gpus. Exiting.", flush=True)
    print("[rank0]:[W1124 22:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called")
sys.exit(int(sys.argv[1]))
"""
LAST_WORDS = "; it printed last: loading / Unable to locate sufficient 2 gpus. Exiting."


@pytest.mark.parametrize("changes", [{"attach": True}, {"attach": False}, {"metric": "tps: (.)"}], ids=str)
def test_what_a_program_says_at_last_is_quoted(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "train.py").write_text(SAYS)
    command = f"{sys.executable} {tmp_path}/train.py {{status}}"
    ended = str(failure(tmp_path, command, values={"status": 0}, **changes))
    assert LAST_WORDS in ended
    # Whether it has an optimizer is only known of one that ran to its end.
    failed = str(failure(tmp_path, command, values={"status": 3}, **changes))
    assert failed == f"the command ended with exit status 3{LAST_WORDS}"


@pytest.mark.end_to_end
def test_what_torchrun_says_of_a_program_is_none_of_its_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAYS)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={{ranks}}"
    failed = failure(tmp_path, f"{torchrun} {tmp_path}/train.py 3", ranks=2)
    assert str(failed) == f"the command ended with exit status 1{LAST_WORDS}"


def test_snapshots_in_the_working_folder_are_warned_of(tmp_path: Path) -> None:
    made, record = tmp_path / "made", recorded(tmp_path / "made", recording())
    (made / "deep").mkdir()
    (made / "pytorch_model.bin").write_text("old")
    train = shell(f"{record}; date +%N%s >> snapshot.pt; echo x > deep/{{repetition}}.ckpt; echo x > log.txt")
    more = {"directory": str(made), "finish": True}
    (wrote,) = measured(tmp_path, train, **more)["warnings"]
    assert wrote.startswith("A run wrote snapshot.pt, deep/0.ckpt into job.directory")
    (again,) = measured(tmp_path, train, **more)["warnings"][:1]
    assert again.startswith("A run found snapshot.pt")
    # One that has nothing left to train says what it may have gone on from.
    assert "it found snapshot.pt, pytorch_model.bin, " in str(failure(tmp_path, "true", directory=str(made)))
    # In run directories nobody else loads them.
    for directory, where in (("{run}", "."), (str(tmp_path), "{run}"), (str(tmp_path.parent), "{run}")):
        own = shell(f"{record}; mkdir -p {where}/o; date +%N%s >> {where}/o/snapshot.pt")
        assert measured(tmp_path, own, directory=directory, finish=True)["warnings"] == []


def test_a_recorder_that_gives_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "SETTLE_S", 0.3)
    error = "Recording ended with an error (RuntimeError: no)."
    enough, less = (recording(host_us=[100.0] * steps, problems=[error]) for steps in (3, 2))
    found = measured(tmp_path, shell(f"{recorded(tmp_path / 'made', enough)}; {LONG}"))
    assert (len(job(found).step.samples_us), found["warnings"]) == (3, [f"Rank 0: {error}"])
    failed = failure(tmp_path, shell(f"{recorded(tmp_path / 'made', less)}; {LONG}"))
    assert (failed.timed_out, error in str(failed)) == (False, True)


def test_once_a_rank_has_given_up_the_others_are_hardly_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_run, "GIVE_UP_S", 0.2)
    slow = recording(0, 3, host_us=[900.0] * 5, gave_up=True)
    for others in ([], [recording(1, 3, host_us=[800.0] * 9, trace="t.gz"), recording(2, 3, host_us=[7.0])]):
        found = measured(
            tmp_path, shell(f"{recorded(tmp_path / 'made', slow, *others)}; {LONG}"), ranks=3, steps=9, profile_steps=3
        )
        assert (job(found).gave_up, job(found).step.samples_us) == (True, [900.0] * 5)
        assert (found["warnings"], found["traces"]) == ([], [])


@pytest.mark.parametrize(("changes", "give_up_us"), [({}, 5.0), ({"finish": True}, None), ({"metric": "(5)"}, None)])
def test_only_recorded_steps_that_need_not_go_on_are_given_up(
    tmp_path: Path, changes: dict[str, Any], give_up_us: float | None
) -> None:
    record = recorded(tmp_path / "made", recording())
    point = job_point(shell(f"env > {tmp_path}/env; {record}; for i in 1 2 3 4 5 6; do echo 5; done"), **changes)
    (tmp_path / "run").mkdir()
    run(point, tmp_path / "run", Here(environment=os.environ, limit_s=30.0, give_up_us=give_up_us or 5.0))
    (given,) = (line for line in (tmp_path / "env").read_text().splitlines() if line.startswith(RECORD_VARIABLE))
    wanted = wanted_from({RECORD_VARIABLE: given.removeprefix(f"{RECORD_VARIABLE}=")})
    assert wanted
    assert wanted.give_up_us == give_up_us


def test_the_reason_is_the_first_exception_that_was_not_handled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('no bucket') from e\n"
    )
    # As torchrun's, whose own traceback comes last.
    other = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED"
    after = f"echo Traceback \\(most recent call last\\):; echo {other}; exit 1"
    failed = failure(tmp_path, shell(f"{sys.executable} {tmp_path}/train.py; {after}"))
    assert str(failed) == "the command ended with exit status 1: ValueError: no bucket"


def test_who_hangs_is_ended_and_told_how_far_it_came(tmp_path: Path) -> None:
    failed = failure(tmp_path, shell(f"echo step 1; {LONG}"), limit_s=0.5)
    assert (failed.timed_out, failed.final) == (True, False)
    said = "not measured within 0.5 s: no rank had finished all of 5 steps and 3 profiled ones"
    assert f"{said}, none was seen to end its first; " in str(failed)
    assert "put -m overlap_sweep.attach in front of the script" in str(failed)
    assert "runtime.timeout_factor" in str(failed)
    failed = failure(tmp_path, shell(f"echo 1 3 > {{run}}/{STEPS_FILE}; {LONG}"), limit_s=0.5)
    assert f"{said}, a rank had ended at least 3; " in str(failed)
    half = shell(f"{recorded(tmp_path / 'made', recording(1, 2))}; {LONG}")
    failed = failure(tmp_path, half, limit_s=1.0, ranks=2, runtime={"timeout_s": 1.0})
    assert (failed.timed_out, failed.final) == (True, False)
    assert "1 of 2 ranks had recorded" in str(failed)
    assert "runtime.timeout_s" in str(failed)
    assert "step 1" in (tmp_path / "run" / LOG_FILE).read_text()


def test_stopped_by_the_user_it_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path, shell(f"setsid {LONG} & {LONG}"))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_errors_are_read_of_the_attempt_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  x\nValueError: before\n")
    start = log.stat().st_size
    with log.open("a") as more:
        more.write("train.py: error: unrecognized arguments: --bucket 3\n")
    assert ending(2, log, start) == "ended with exit status 2: train.py: error: unrecognized arguments: --bucket 3"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["loss 3", "an Error: of its own"], ""),
        (
            ["[rank1]: Traceback (most recent call last):", "[rank1]:   File", "[rank1]: a.b.OutOfMemoryError: 3 GiB"],
            "a.b.OutOfMemoryError: 3 GiB",
        ),
        (["Traceback (most recent call last):", "step 4", "AssertionError", "later"], "AssertionError"),
        (
            ["exitcode : -9", "  traceback : Signal 9 (SIGKILL) received by PID 12"],
            "Signal 9 (SIGKILL) received by PID 12",
        ),
        (["  traceback : Signal 15 (SIGTERM) received by PID 12"], ""),
        (["/v/bin/python3: No module named train"], "/v/bin/python3: No module named train"),
        (
            ["python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')"],
            "python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')",
        ),
    ],
)
def test_errors_are_told_from_what_else_is_printed(lines: list[str], error: str) -> None:
    assert first_error(lines) == error


TPS = "tps: ([0-9.,]+)"


def printing(*pieces: str, then: str = LONG) -> str:
    """A command that prints pieces of text, as printf knows them, one after the other."""
    return shell("; sleep 0.05; ".join(f'printf "{piece}"' for piece in pieces) + f"; {then}")


def test_a_metric_may_have_separators_that_its_expression_lacks(tmp_path: Path) -> None:
    lines = "tps: 1,250\\ntps: 382,941, mfu 1\\ntps: 1,000,000.5\\ntps: 400,1\\ntps: 500,50 6\\n"
    found = measured(tmp_path, printing(lines), metric="tps: ([0-9.]+)")
    assert [1e6 / time_us for time_us in job(found).step.samples_us] == pytest.approx([382941, 1000000.5, 400, 500])


def test_a_metric_is_read_from_pieces_of_colourful_lines(tmp_path: Path) -> None:
    pieces = (
        "loss 7 tps: 1\\n",
        "tps: 2",
        "00 x\\nt",
        "ps: \\033[32m1,000.0\\033[0m\\r",
        "tps: 400\\ntps: 500\\ntps: 9",
    )
    found = measured(tmp_path, printing(*pieces), metric=TPS)
    assert job(found).step.samples_us == [5000.0, 1000.0, 2500.0, 2000.0]
    assert (job(found).timed_by, job(found).unit) == ("metric", "tps")
    assert job(found).calls_per_step is None
    (warning,) = found["warnings"]
    assert "no rank recorded" in warning


def test_a_metric_of_several_ranks_counts_by_the_slowest(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]:step tps: {10 * step + rank}" for step in range(1, 6) for rank in (1, 0)]
    found = measured(tmp_path, printing("\\n".join([*lines, ""])), metric=TPS, ranks=2)
    assert job(found).step.samples_us == [1e6 / rate for rate in (20, 30, 40, 50)]


@pytest.mark.parametrize(
    ("changes", "first_us", "unit", "objective_us"),
    [
        ({"metric_is": "seconds"}, 2e6, "", 3.5e6),
        ({"metric_is": "milliseconds"}, 2e3, "", 3.5e3),
        ({"metric_is": "seconds", "samples_per_step": "10"}, 2e6, "", 3.5e5),
        ({"samples_per_step": "10"}, 5e6, "", (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6),
        ({"tokens_per_step": "10"}, 5e6, "", (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6),
        (
            {"metric": "(?P<tokens>[0-9]+)", "samples_per_step": "10"},
            5e5,
            "tokens",
            (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6,
        ),
    ],
)
def test_a_metric_is_a_rate_or_a_time(
    tmp_path: Path, changes: dict[str, Any], first_us: float, unit: str, objective_us: float
) -> None:
    found = measured(tmp_path, printing("1\\n2\\n3\\n4\\n5\\n"), **{"metric": "([0-9]+)", **changes})
    assert (job(found).step.samples_us[0], job(found).unit) == (first_us, unit)
    assert found["objective_us"] == pytest.approx(objective_us)


def test_a_metric_may_be_printed_too_rarely_or_be_no_number(tmp_path: Path) -> None:
    found = measured(tmp_path, printing("tps: 1\\ntps: 2\\ntps: 3\\ntps: 4", then="exit 0"), metric=TPS)
    assert len(job(found).step.samples_us) == 3
    assert any("ended after 3 timed steps of 4" in warning for warning in found["warnings"])
    failed = failure(tmp_path, printing("tps: 1\\ntps: 2\\ntps: 3\\n", then="exit 0"), metric=TPS)
    assert (failed.final, "only 2 numbers of job.metric" in str(failed)) == (True, True)
    for number in ("fast", "0", "nan"):
        failed = failure(tmp_path, printing(f"tps: {number}\\n" * 5), metric="tps: (.+)")
        assert (failed.final, f"found '{number}'" in str(failed)) == (True, True)
    failed = failure(tmp_path, printing("tps: 1\\n"), limit_s=0.5, metric=TPS)
    assert (failed.timed_out, "found 1 times of 5" in str(failed)) == (True, True)


PROFILES = """
import json, os, sys, time

made, directory = sys.argv[1:]
for step in range(1, 200):
    if step == 6:
        began = time.time()
    time.sleep(0.1)
    print(f"tps: {step}", flush=True)
    if step == 8:
        content = json.load(open(f"{made}/job_rank0.json")) | {"profiled_s": [began, time.time()]}
        json.dump(content, open(f"{directory}/.job", "w"))
        os.rename(f"{directory}/.job", f"{directory}/job_rank0.json")
"""
"""Profiles the sixth to the eighth step."""


@pytest.mark.end_to_end
def test_what_is_printed_while_the_profiler_works_does_not_count(tmp_path: Path) -> None:
    """Nor the first number after it, whose time began before."""
    recorded(tmp_path / "made", recording(host_us=[100.0] * 8))
    (tmp_path / "train.py").write_text(PROFILES)
    command = f"{sys.executable} -I -S {tmp_path}/train.py {tmp_path}/made {{run}}"
    found = measured(tmp_path, command, metric=TPS, steps=8)
    counted = {round(1e6 / us) for us in job(found).step.samples_us}
    assert len(counted) == 8
    assert not counted & {1, 6, 7, 8, 9}
    # It is known within some hundredths of a second when something was printed: those next to it may count or not.
    assert counted >= {2, 3, 11}


@pytest.mark.parametrize("recorder", ["records", "is lost", "sees no step"])
def test_recordings_are_waited_for_if_there_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: str
) -> None:
    monkeypatch.setattr(job_run, "SETTLE_S", 0.5 if recorder == "is lost" else 120.0)
    steps = "true" if recorder == "sees no step" else f"echo 1 1 > {{run}}/{STEPS_FILE}"
    record = recorded(tmp_path / "made", recording(calls_per_step=2)) if recorder == "records" else "true"
    print_five = "for i in 1 2 3 4 5; do echo tps: $i; done"
    began = time.monotonic()
    found = measured(tmp_path, shell(f"{steps}; {print_five}; sleep 0.4; {record}; {LONG}"), metric=TPS)
    assert job(found).calls_per_step == (2 if recorder == "records" else None)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("metric", "changes", "refused"),
    [
        ("tps: ([0-9", {}, True),
        ("tps: [0-9]", {}, True),
        ("(tps|rate): ([0-9])", {}, True),
        ("tps: ([0-9])", {}, True),
        ("tps: ([0-9])", {"metric_is": "seconds"}, False),
        ("tps: (?P<tokens>[0-9])", {}, False),
        ("(?:tps|rate): ([0-9])", {"samples_per_step": None}, False),
    ],
)
def test_a_metric_that_cannot_be_understood_is_refused(metric: str, changes: dict[str, Any], refused: bool) -> None:
    given = {"tokens_per_step": "2", "samples_per_step": "2", "metric": metric, **changes}
    with pytest.raises(UserError, match=r"job\.metric=") if refused else nullcontext():
        job_point("true", **given)
