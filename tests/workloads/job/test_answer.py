"""Which setting of a user's command is fastest. How it is told, doubts included: made/job_answers, made/every_workload
and job among the golden files."""

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from overlap_sweep.compare.sweeps import compare_sweeps, read_dataset
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.report.searches import knob_lines
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import read_points
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.study import words
from overlap_sweep.study.analysis import analyse
from overlap_sweep.study.section import section
from overlap_sweep.study.words import headline
from overlap_sweep.workloads import read_sources
from overlap_sweep.workloads.job.command import command_line
from overlap_sweep.workloads.job.rows import NAMING, options_of
from overlap_sweep.workloads.job.study import STUDY, Analysis
from overlap_sweep.workloads.job.tables import ANSWERS
from tests.make_point import ENVIRONMENT, job_config, make_point

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


def repeated(directory: Path, times_us: Mapping[int, list[float]], **measured: Any) -> Analysis:
    """The analysis of runs by bucket, repeated in alternation."""
    for repetition in range(max(map(len, times_us.values()))):
        for bucket, of_bucket in times_us.items():
            if repetition < len(of_bucket):
                config = {"repetition": repetition}
                run(directory, {"bucket": bucket}, config=config, step_us=of_bucket[repetition], **measured)
    return analysis_of(directory)


def test_runs_that_scatter_make_a_tie_of_what_one_run_would_decide(tmp_path: Path) -> None:
    """Within each run the times hardly vary: only repetitions show that they say little."""
    analysis = repeated(tmp_path, {25: [100_000.0, 106_000.0, 94_000.0], 100: [96_000.0, 102_000.0, 90_000.0]})
    assert analysis.best is analysis.reference
    assert analysis.gain is None
    assert analysis.best.times.between_runs_us == pytest.approx(6_000.0)
    assert analysis.best.step.noise_us > 3_000.0


@pytest.mark.parametrize(
    ("runs", "few"),
    [([1, 1], True), ([2, 2], True), ([3, 1], True), ([5, 1], True), ([3, 3], False), ([2, 2, 2, 2], False)],
    ids=str,
)
def test_too_few_runs_have_no_winner_and_say_so(tmp_path: Path, runs: list[int], few: bool) -> None:
    """However far apart they are: it may be what runs of one setting differ by."""
    times_us = {25 + 25 * number: [100_000.0 * 0.8**number] * count for number, count in enumerate(runs)}
    analysis = repeated(tmp_path, times_us)
    fastest = f"bucket={25 * len(runs)}"
    assert (analysis.too_few_runs, analysis.best.setting) == (few, "bucket=25" if few else fastest)
    assert (analysis.gain is None) == few
    assert analysis.reference.standing == "reference"
    (answer,) = ANSWERS.records([analysis])
    assert answer["too_few_runs"] == few
    assert ("repetition=0,1,2" in headline(analysis)) == few


def test_a_setting_with_one_run_is_left_out_where_others_can_be_judged(tmp_path: Path) -> None:
    analysis = repeated(tmp_path, {25: [100_000.0] * 3, 100: [95_000.0] * 3, 400: [50_000.0]})
    assert (analysis.best.setting, analysis.too_few_runs) == ("bucket=100", False)
    assert any("Too few runs to judge bucket=400" in one for one in words.cautions(STUDY, analysis))


def test_load_on_one_run_makes_no_winner_of_two_runs_each(tmp_path: Path) -> None:
    """As seen on a machine that others used: 24 % less time, of nothing."""
    analysis = repeated(tmp_path, {25: [100_000.0, 140_000.0], 100: [91_000.0, 91_500.0]})
    assert analysis.best is analysis.reference
    more = repeated(tmp_path / "more", {25: [100_000.0, 140_000.0, 99_000.0], 100: [91_000.0, 91_500.0, 90_900.0]})
    assert (more.best, more.too_few_runs) == (more.reference, False)


def test_what_was_started_first_is_the_reference(tmp_path: Path) -> None:
    """Not what sorts first by name, nor what is unset."""
    for bucket, minute in ((5, 3), (25, 1), (100, 2)):
        started = f"2026-11-20T21:{minute:02}:00+00:00"
        run(tmp_path, {"bucket": bucket}, step_us=100_000.0 + bucket, started=started)
    assert analysis_of(tmp_path).reference.setting == "bucket=25"


@pytest.mark.parametrize(
    ("amounts", "best", "work"),
    [
        # Twice the samples in 1.8 times the time.
        ([{"samples_per_step": 32.0}, {"samples_per_step": 64.0}], "batch=16", "sample"),
        ([{"tokens_per_step": 1e4}, {"tokens_per_step": 2e4}], "batch=16", "token"),
        ([{}, {}], "batch=8", "step"),
        ([{"samples_per_step": 32.0}, {}], "batch=8", "step"),
    ],
)
def test_settings_are_compared_by_the_work_that_is_known_of_all(
    tmp_path: Path, amounts: list[dict[str, float]], best: str, work: str
) -> None:
    for repetition in range(3):
        for batch, step_us, amount in zip((8, 16), (100_000.0, 180_000.0), amounts, strict=True):
            run(tmp_path, {"batch": batch}, config={"repetition": repetition}, step_us=step_us, **amount)
    analysis = analysis_of(tmp_path)
    assert (analysis.best.setting, analysis.work) == (best, work)
    mixed = [one for one in words.cautions(STUDY, analysis) if "unknown for batch=16" in one]
    other = [one for one in words.cautions(STUDY, analysis) if "train differently" in one]
    assert (bool(mixed), bool(other)) == (len({len(one) for one in amounts}) > 1, work != "step")


@pytest.mark.parametrize(
    "other",
    [
        {"job.ranks": 4},
        {"job.command": "torchrun train.py --compile --bucket {bucket}"},
        {"job.directory": "elsewhere"},
        {"job.optimizer_steps": 2},
        {"job.metric": "tps: ([0-9.]+)"},
        {"job.files": {"train.py": "another digest"}},
    ],
    ids=str,
)
def test_what_is_another_job_is_another_case(tmp_path: Path, other: dict[str, Any]) -> None:
    run(tmp_path, {"bucket": 25}, config={"job.files": {"train.py": "digest"}})
    run(tmp_path, {"bucket": 100}, config={"job.files": {"train.py": "digest"}, **other}, step_us=50_000.0)
    one, two = analyses_of(tmp_path)
    assert [len(one.rows), len(two.rows)] == [1, 1]
    assert one.title != two.title


def test_another_gpu_is_another_case(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, environment={**ENVIRONMENT, "gpu": "NVIDIA B200"})
    assert [analysis.case.device for analysis in analyses_of(tmp_path)] == ["NVIDIA B200", "NVIDIA H200"]


@pytest.mark.parametrize(
    "other",
    [
        {"job.steps": 50},
        {"job.skip_steps": 2},
        {"job.finish": True},
        {"job.attach": False},
        {"job.profile_steps": 0},
        {"repetition": 1},
    ],
    ids=str,
)
def test_how_it_was_measured_makes_no_other_setting(tmp_path: Path, other: dict[str, Any]) -> None:
    run(tmp_path)
    run(tmp_path, config=other)
    (row,) = analysis_of(tmp_path).rows
    assert (row.setting, len(row.points), row.standing) == ("defaults", 2, "only")


def test_files_of_one_name_are_numbered(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        run(tmp_path, {"overlap": f"/{folder}/tuned.yaml"})
    run(tmp_path, {"overlap": "/b/tuned.yaml"}, config={"job.files": {"/b/tuned.yaml": "changed since"}})
    rows = analysis_of(tmp_path).rows
    assert {row.setting for row in rows} == {f"overlap=tuned.yaml{number}" for number in ("", " #2", " #3")}


def test_a_script_that_a_value_names_is_a_setting(tmp_path: Path) -> None:
    for script in ("ddp.py", "fsdp.py"):
        config = {"job.command": "torchrun {script}", "job.files": {script: f"digest of {script}"}}
        run(tmp_path, {"script": script}, config=config)
    analysis = analysis_of(tmp_path)
    assert analysis.case.script == "{script}"
    assert {row.setting for row in analysis.rows} == {"script=ddp.py", "script=fsdp.py"}


def test_a_setting_without_traces_says_so_beside_what_would_have_recorded_them(tmp_path: Path) -> None:
    early = "Rank 0: The script ended after 15 steps, but profiling steps 28 to 30 takes 31: job.steps=4 would do."
    run(tmp_path, {"bucket": 25}, exposed={"DP, ranks 0,1": 9_000.0})
    run(tmp_path, {"bucket": 100}, warnings=[early])
    analysis = analysis_of(tmp_path)
    notes = {row.setting: row.note for row in analysis.rows}
    assert ("not profiled" in notes["bucket=25"], notes["bucket=100"]) == (False, "not profiled")
    assert early in words.cautions(STUDY, analysis)


def test_advice_names_the_settings_that_it_is_for(tmp_path: Path) -> None:
    exposed = {"DP, ranks 0,1": 9_000.0}
    run(tmp_path, {"bucket": 25}, exposed=exposed, causes={"issued_late": 0.09})
    run(tmp_path, {"bucket": 100}, exposed=exposed, causes={"issued_late": 0.04, "dependency": 0.03})
    found = section(STUDY, read_sources(tmp_path, AnalysisConfig()))
    assert found
    (notes,) = (one.notes for answer in found.answers for one in answer.more)
    assert [note.partition(":")[0] for note in notes] == [
        "Try for issued_late with bucket=25, bucket=100",
        "Try for dependency with bucket=100",
    ]


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


def test_the_order_of_values_makes_no_other_setting(tmp_path: Path) -> None:
    run(tmp_path, {"a": 1, "b": 2}, config={"job.command": "torchrun train.py {a} {b}"})
    run(tmp_path, {"b": 2, "a": 1}, config={"job.command": "torchrun train.py {a} {b}"})
    (row,) = analysis_of(tmp_path).rows
    assert (len(row.points), row.whole_setting) == (2, "a=1, b=2")


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"command": "torchrun {script}"}, "{script} without a value"),
        ({"command": "torchrun 'train.py"}, "open quote"),
        ({"values": {"bucket": [1]}}, "$.point.job.values"),
        ({"ranks": 0}, "$.point.job.ranks"),
        ({"directory": None}, "$.point.job.directory"),
        ({"env": None}, "$.point.job.env"),
    ],
)
def test_a_result_whose_command_cannot_be_told_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    run(tmp_path)
    (path,) = tmp_path.glob("*/result.json")
    result = json.loads(path.read_text())
    result["point"]["job"] |= change
    path.write_text(json.dumps(result))
    (problem,) = read_points(tmp_path).problems
    assert reason in problem


def test_variables_that_are_swept_make_no_other_environment(tmp_path: Path) -> None:
    for algo in ("Ring", "Tree"):
        environment = {**ENVIRONMENT, "variables": {"NCCL_ALGO": algo}}
        run(tmp_path, {}, {"NCCL_ALGO": algo}, environment=environment)
    assert not any("environment" in one for one in words.cautions(STUDY, analysis_of(tmp_path)))
    run(tmp_path, {}, {"NCCL_ALGO": "Ring"}, environment={**ENVIRONMENT, "driver": "590.2"})
    assert any("environment" in one for one in words.cautions(STUDY, analysis_of(tmp_path)))


EDITED = {"job.command": "torchrun train.py --fused --bucket {bucket}"}


def test_a_sweep_is_compared_with_one_of_a_changed_command(tmp_path: Path) -> None:
    for repetition, verdict in enumerate(("unknown", "faster")):
        for bucket, step_us in ((25, 100_000.0), (100, 90_000.0)):
            for name, changed, times in (("old", {}, 1.0), ("new", EDITED, 0.8)):
                config = job_config({"bucket": bucket}, repetition=repetition, **changed)
                make_point("job", tmp_path / name, config, step_us=step_us * times)
        found = compare_sweeps([read_dataset(name, tmp_path / name) for name in ("old", "new")], "old")
        # One run each says nothing.
        assert {match.ours.key.setting: match.verdict for match in found.matches} == {
            "bucket=25": verdict,
            "bucket=100": verdict,
        }


def test_two_commands_of_one_script_do_not_hide_each_other(tmp_path: Path) -> None:
    make_point("job", tmp_path, job_config({"bucket": 25}), step_us=100_000.0)
    make_point("job", tmp_path, job_config({"bucket": 25}, **EDITED), step_us=80_000.0)
    found = read_dataset("both", tmp_path)
    assert sorted(time.time.time_us for time in found.found.times) == [80_000.0, 100_000.0]
    assert len(set(found.keys)) == 2
