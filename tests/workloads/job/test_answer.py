"""What searches decide about a user's command, and how it is pasted. Which setting is fastest, and how it is told:
answers/job, made/job_answers, made/every_workload and job among the golden files."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.report.searches import knob_lines
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.study.analysis import analyse
from overlap_sweep.study.words import headline
from overlap_sweep.workloads import read_sources
from overlap_sweep.workloads.job.command import command_line
from overlap_sweep.workloads.job.rows import NAMING, options_of
from overlap_sweep.workloads.job.study import STUDY, Analysis
from tests.make_point import job_config, make_point, timing_of

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def run(
    directory: Path,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    **measured: Any,
) -> None:
    """A job that was started a minute after the one before."""
    minute = len(list(directory.glob("*")))
    measured.setdefault("started", f"2026-11-20T21:{minute:02}:00+00:00")
    make_point("job", directory, job_config(values, env, **(config or {})), **measured)


def analyses_of(directory: Path) -> list[Analysis]:
    sources = read_sources(directory, AnalysisConfig())
    assert not sources.reading.problems
    return analyse(STUDY, sources.reading.points, sources.records.knobs)


def analysis_of(directory: Path) -> Analysis:
    (analysis,) = analyses_of(directory)
    return analysis


def test_runs_that_timed_few_steps_are_not_compared_with_long_ones(tmp_path: Path) -> None:
    """Nor is what was given up taken for such: it was as slow as it began."""
    for repetition, (step_us, steps) in enumerate([(150_000.0, 20), (100_000.0, 400), (101_000.0, 398)]):
        config = {"repetition": repetition, "job.steps": steps}
        run(tmp_path, config=config, step=timing_of([step_us, step_us + 2.0] * (steps // 2)))
    slow = {"config": {"repetition": 3, "job.steps": 400}, "step": timing_of([200_000.0] * 5), "gave_up": True}
    assert analysis_of(tmp_path).reference.time_us == 100_501.0
    run(tmp_path, **slow)
    assert analysis_of(tmp_path).reference.time_us == pytest.approx(133_667.3, rel=1e-4)


def test_a_search_that_proved_its_answer_decides(tmp_path: Path) -> None:
    """Also against a setting that single points make faster."""
    for repetition in range(3):
        for bucket, step_us in ((25, 100_000.0), (100, 97_000.0), (400, 90_000.0)):
            run(tmp_path, {"bucket": bucket}, config={"repetition": repetition}, step_us=step_us)
    key = "+job.values.bucket"
    search = {"label": "train.py", "overrides": [], "knobs": {key: ["25", "100", "400"]}, "baseline_points": ["job_0"]}
    times = {"time_us": 97_500.0, "baseline_us": 100_500.0, "gain": Gain(0.03, 0.004), "proven": True}
    KnobRecord(searches=[KnobSearch(**search, **times, best={key: "100"}, best_points=["job_4"])]).write(tmp_path)
    analysis = analysis_of(tmp_path)
    assert (analysis.best.setting, analysis.proven, analysis.gain) == ("bucket=100", True, Gain(0.03, 0.004))
    # The search states times, too: of a setting there is one.
    assert (analysis.best.time_us, analysis.reference.time_us) == (97_500.0, 100_500.0)
    for stopped, best in (("", "bucket=25"), ("search.max_points=12 is used up", "bucket=400")):
        nothing = KnobSearch(**search, time_us=1.0, baseline_us=1.0, stopped=stopped, best_points=["job_0"])
        KnobRecord(searches=[nothing]).write(tmp_path)
        assert analysis_of(tmp_path).best.setting == best
    # A baseline that is not the reference is kept, and not said to be faster or slower.
    kept = KnobSearch(**{**search, "baseline_points": ["job_1"]}, time_us=1.0, baseline_us=1.0, best_points=["job_1"])
    KnobRecord(searches=[kept]).write(tmp_path)
    assert headline(analysis_of(tmp_path)) == "Nothing beat bucket=100 beyond the noise; keep it"
    (line,) = (
        line for line in knob_lines(KnobRecord(searches=[replace(kept, best_points=[])])) if "not recorded" in line
    )
    assert "search again with resume=" in line


@pytest.mark.parametrize(
    ("config", "typed"),
    [
        ({}, "torchrun --nproc-per-node=2 train.py --size 512"),
        ({"job.directory": "my runs"}, "cd 'my runs' && torchrun --nproc-per-node=2 train.py --size 512"),
        ({"job.values": {"b": "a b"}, "job.command": 'python x.py "{b}" {b}'}, "python x.py 'a b' a b"),
        ({"job.env": {"A": "{ranks} x", "B": None}, "job.command": "./run"}, "A='2 x' ./run"),
        (
            {"runtime": {"max_connections": 8}, "job.command": "./run {run}/out"},
            f"mkdir -p run && {CONNECTIONS}=8 ./run run/out",
        ),
        ({"job.values": {"on": True}, "job.command": "./run --on={on} {{a}}"}, "./run --on=true '{a}'"),
    ],
    ids=str,
)
def test_the_command_can_be_pasted(config: dict[str, Any], typed: str) -> None:
    assert command_line(job_config(**config)) == typed
    assert shlex.split(typed)


@pytest.mark.parametrize(
    ("folder", "written"), [("{run}", "run/o"), ("{run}/deep", "run/o"), (".", "run/o"), ("there", "there/run/o")]
)
def test_the_command_that_is_pasted_finds_the_folders_that_it_names(tmp_path: Path, folder: str, written: str) -> None:
    (tmp_path / "there").mkdir()
    config = {"job.directory": folder, "job.command": "sh -c 'echo $TO > {run}/o'", "job.env": {"TO": "{run}/x"}}
    for _ in range(2):
        subprocess.run(["sh", "-c", command_line(job_config(**config))], cwd=tmp_path, check=True)
    (made,) = (path for path in tmp_path.rglob("o"))
    assert made == tmp_path / written


def test_megatron_is_told_the_users_file() -> None:
    slots = {"fc1_fprop": {"method": "ring_exchange", "aggregate": False}}
    given = {"overlap_cfg": {"slots": slots, "switches": {**SWITCH_DEFAULTS, "tp_comm_overlap": True}}}
    command = "torchrun pretrain_gpt.py {overlap:megatron}"
    point = job_config({"overlap": "tuned.yaml"}, **{"job.command": command}, **given)
    words = shlex.split(command_line(point))
    assert words[words.index("--tp-comm-overlap-cfg") + 1] == "tuned.yaml"


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({}, "defaults"),
        ({"values": {"bucket": 25}, "env": {"A": "b"}}, "bucket=25, A=b"),
        ({"values": {"on": False, "none": None, "empty": ""}}, "empty=, on=false"),
        ({"values": {"flags": "--a b/c --d"}}, "flags=--a b/c --d"),
        ({"runtime": {"multicast": True}}, "multicast=true"),
    ],
    ids=str,
)
def test_a_whole_setting_in_words(point: dict[str, Any], words: str) -> None:
    assert NAMING.in_words(options_of(job_config(**point))) == words
