"""launch.py end to end on the CPU: real processes, real collectives, real traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from overlap_sweep.run_directory import Result, is_trace_of
from tests.sweeps import ROOT, SMALL, Launch

pytestmark = pytest.mark.end_to_end


def launch_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_help_shows_groups_and_examples() -> None:
    shown = launch_py("launch.py", "--help").stdout
    assert "python launch.py -m tp_size=2,4,8 method=bulk num_sm=1,2,4,8,16" in shown
    for group in ("backend", "experiment", "method", "model", "num_sm", "operator", "tp_size", "workload"):
        assert f"\n{group}: " in shown
    assert "_schema" not in shown


def test_help_imports_no_torch() -> None:
    imported = launch_py("-X", "importtime", "launch.py", "--help").stderr
    assert "hydra" in imported
    assert "torch" not in {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines()}


def test_cfg_job_shows_the_composed_configuration() -> None:
    shown = yaml.safe_load(launch_py("launch.py", "--cfg", "job", "tp_size=8", "num_sm=37", "method=pipeline").stdout)
    assert (shown["tp_size"], shown["num_sm"], shown["method"], shown["num_splits"]) == (8, 37, "pipeline", 4)
    assert shown["model"]["hidden_size"] == 1024


@pytest.mark.parametrize(("typed", "offered"), [("num_sm=", "num_sm=16"), ("tp_size=", "tp_size=8"), ("mod", "model=")])
def test_shell_completion(typed: str, offered: str) -> None:
    answer = launch_py("launch.py", "-sc", "query=bash", COMP_LINE=f"python launch.py {typed}", COMP_POINT="99")
    assert offered in answer.stdout.split()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model=nobody",), "nobody"),
        (("tp_size=9",), "tp_size=9 is out of range; give a value from 1 to 8"),
        (("num_sm=0",), "num_sm=0 is out of range"),
        (("num_sm=1.5",), "'1.5' of type 'float' could not be converted to Integer"),
        (("tp_size=true",), "Could not find 'tp_size/True'"),
        (("workload=1",), "Could not find 'workload/1'"),
        (("-m", "num_sm=1,0"), "num_sm=0 is out of range"),
        (("operator=fc3",), "fc3"),
        (("phase=sideways",), "phase=sideways is not known; choose one of all, fprop, dgrad, wgrad"),
        (("backend=magic",), "magic"),
        (("workload.tokens=many",), "many"),
        (("workload.name=play",), "workload=play is not known; choose one of operator"),
        (("workload.repeats=1",), "workload.repeats=1 is out of range"),
        (("profile=some",), "profile=some is not known; choose one of all, best, none"),
        (("precision=fp4",), "precision=fp4 is not known; choose one of fp32, fp16, bf16, fp8_delayed, fp8_current"),
        (("workload=layer", "layer.variants=[none,magic]"), "layer.variants: magic is not known; choose among none"),
        (("-m", "workload=operator,layer", "layer.variants=[magic]"), "layer.variants: magic is not known"),
        (("workload=layer", "layer.tp_comm_overlap_cfg=/nowhere.yaml"), "/nowhere.yaml cannot be read"),
        (("workload=layer", "layer.num_replicas=0"), "layer.num_replicas=0 is out of range"),
        (("model=hf",), "model.name"),
        (("model=hf", "model.name=nobody/nothing"), "give a local folder, a config.json"),
        (("model.hidden_size=null",), "model qwen3_0_6b has no hidden_size"),
    ],
)
def test_wrong_input_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = Launch(tmp_path).run(*arguments, "runtime.device=cpu")
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.rglob("result.json"))


def test_more_ranks_than_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = Launch(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}).run("-m", "tp_size=1,2")
    assert done.returncode == 1
    assert "tp_size=2 needs 2 GPUs and 1 are visible" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_more_replicas_than_gpus_are_refused_before_anything_starts(tmp_path: Path) -> None:
    launch = Launch(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})
    done = launch.run("-m", "workload=layer", "tp_size=2", "layer.num_replicas=1,2", "runtime.device=cuda")
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: tp_size=2 with layer.num_replicas=2 needs 4 GPUs and 2 are visible")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("backend=transformer_engine", "transformer_engine"),
        ("backend=megatron", "backend=megatron has no whole layers"),
        ("layer.variants=[none,default]", "default: backend=torch has no default overlap of its own"),
    ],
)
def test_a_layer_that_cannot_run_on_a_cpu_is_skipped_with_the_reason(tmp_path: Path, argument: str, says: str) -> None:
    launch = Launch(tmp_path)
    done = launch.run("workload=layer", "runtime.device=cpu", argument)
    (result,) = launch.results().values()
    assert result.status == "skipped"
    assert says in str(result.error)
    assert says in done.stderr
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_tuned_configuration_is_compared_on_a_whole_layer(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text(
        "#   tp_comm_overlap_rs: false\n"
        "fc1_fprop: {method: ring_exchange, num_sm: 2}\n"
        "fc2_fprop: {method: pipeline, num_sm: 2, num_splits: 2}\n"
    )
    launch, variant = Launch(tmp_path), f"file:{tuned}"
    done = launch.run(
        *("workload=layer", "tp_size=2", f"layer.variants=[none,{variant},default,ring_exchange]", "profile=best"),
        *("workload.tokens=64", "model.num_attention_heads=4", "model.num_kv_heads=2", *SMALL[:1], *SMALL[2:]),
    )
    assert done.returncode == 0, done.stderr
    (result,) = launch.results().values()
    assert result.status == "ok", result.error
    assert result.point["backend"] == "torch"
    assert str(result.attention_backend).endswith("(torch)")
    assert list(result.variants) == ["none", variant, "ring_exchange", "floor"]
    assert result.variants[variant].settings["fc2_fprop"] == {"method": "pipeline", "num_sm": 2, "num_splits": 2}
    assert not result.variants[variant].switches["tp_comm_overlap_rs"]
    for name in (variant, "ring_exchange"):
        assert max(result.variants[name].relative_error.values()) < 1e-4
    assert "trace_none_rank1.json.gz" in result.traces
    assert all((tmp_path / "single" / trace).stat().st_size > 0 for trace in result.traces)
    (warning,) = result.warnings
    assert warning.startswith("default was not measured: backend=torch has no default overlap of its own")
    lines = [line.split()[:1] for line in done.stdout.splitlines()]
    assert all([name] in lines for name in ("none", "ring_exchange", "floor"))
    assert variant in done.stdout.replace("\n", "")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, subprocess.CompletedProcess[str]]:
    """A grid with sensible and senseless points, at two world sizes."""
    launch = Launch(tmp_path_factory.mktemp("sweep"))
    return launch, launch.run("-m", "tp_size=4,2", "operator=fc1,fc2", "method=bulk,ring_exchange", *SMALL)


def ok_results(launch: Launch) -> dict[str, Result]:
    return {name: result for name, result in launch.results().items() if result.status == "ok"}


def test_a_grid_measures_what_makes_sense(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    launch, done = swept
    assert done.returncode == 0, done.stderr
    results = launch.results()
    assert len(results) == 8
    skipped = {name: result for name, result in results.items() if result.status == "skipped"}
    assert {result.point["operator"] for result in skipped.values()} == {"fc2"}
    assert all("fc2_fprop takes none, ring_exchange, pipeline" in str(result.error) for result in skipped.values())
    assert len(ok_results(launch)) == 6


def test_the_progress_is_plain_lines_when_piped(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    checking, *lines = swept[1].stdout.splitlines()
    assert checking.endswith("Points to measure: 8; checking all before the first")
    assert [line[: len("[1/8]")] for line in lines[:8]] == [f"[{n}/8]" for n in range(1, 9)]
    assert all("left" in line for line in lines[:8])
    assert lines[-2].startswith("best ")
    assert lines[-1].startswith("6 ok, 2 skipped; analyse with: python analyze.py ")
    assert "\x1b" not in swept[1].stdout


def test_points_of_one_world_size_follow_each_other(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    sizes = ["tp2" in line for line in swept[1].stdout.splitlines()[1:9]]
    assert sizes == sorted(sizes, reverse=True)


def test_the_run_directory_is_complete(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    launch, _ = swept
    for name, result in ok_results(launch).items():
        directory = launch.directory / name
        assert (directory / ".hydra" / "config.yaml").exists()
        assert yaml.safe_load((directory / "tp_comm_overlap_cfg.yaml").read_text()) == result.settings
        ranks = range(result.point["tp_size"])
        none = [name for name in result.traces if is_trace_of("none", name)]
        assert result.traces == [*(f"trace_rank{rank}.json.gz" for rank in ranks), *none]
        # One point of every group has a trace of no overlap beside its own.
        assert none in ([], [f"trace_none_rank{rank}.json.gz" for rank in ranks])
        assert all((directory / trace).stat().st_size > 0 for trace in result.traces)
        assert not [path for path in directory.iterdir() if "tmp" in path.name]


def test_the_result_says_what_was_measured_on_what(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    for result in ok_results(swept[0]).values():
        assert set(result.times) == {"fwd", "bwd", "all"}
        for times in result.times.values():
            for timing in (times.point, times.none, times.floor, times.tp1):
                assert timing is not None
                assert len(timing.samples_us) == 3
                assert 0 < timing.q1_us <= timing.median_us <= timing.q3_us
        assert result.point["precision"] == "fp32"
        assert set(result.relative_error) == {"output", "input_grad", "weight_grad", "bias_grad"}
        assert result.environment["packages"]["torch"]
        assert result.environment["variables"]["UB_SKIPMC"] == "1"
        assert result.environment["variables"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert {"before", "after"} == set(result.conditions)


def test_the_group_stays_alive_from_point_to_point(swept: tuple[Launch, subprocess.CompletedProcess[str]]) -> None:
    of_fc1 = [r for r in ok_results(swept[0]).values() if r.point["tp_size"] == 2 and r.point["operator"] == "fc1"]
    assert len(of_fc1) == 2
    # What depends on no knob is measured once per group.
    first, second = (result.times["fwd"].tp1 for result in of_fc1)
    assert first == second


def traces_of(launch: Launch) -> dict[int, tuple[list[str], list[str]]]:
    """By num_sm: the traces that the result names, and those that there are."""
    return {
        result.point["num_sm"]: (
            sorted(result.traces),
            sorted(path.name for path in (launch.directory / name).glob("trace*")),
        )
        for name, result in launch.results().items()
    }


def test_without_profiling_there_are_no_traces(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.run("-m", "num_sm=1,2", "profile=none", *SMALL).returncode == 0
    assert traces_of(launch) == {1: ([], []), 2: ([], [])}


def test_only_the_best_so_far_are_profiled(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.run("-m", "num_sm=1,2,3,4,5,6", "profile=best", *SMALL).returncode == 0
    results = {result.point["num_sm"]: result for result in launch.results().values()}
    traces, best, none_profiled = traces_of(launch), 1.0, False
    # Which ones they are, the noise of the machine decides; that it was they, their own times show.
    for num_sm, result in sorted(results.items()):
        times = result.times["bwd"]
        relative = times.point.median_us / times.none.median_us
        profiled = relative <= best * 1.01
        expected = ["trace_rank0.json.gz", "trace_rank1.json.gz"] if profiled else []
        if profiled and not none_profiled:
            expected = ["trace_none_rank0.json.gz", "trace_none_rank1.json.gz", *expected]
        assert traces[num_sm] == (expected, expected)
        best, none_profiled = min(best, relative), none_profiled or profiled


def test_isolated_points_share_nothing(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.run("-m", "num_sm=1,2", "runtime.isolate=true", *SMALL).returncode == 0
    first, second = (result.times["fwd"].tp1 for result in launch.results().values())
    assert first != second


def test_a_grid_of_senseless_points_is_an_error(tmp_path: Path) -> None:
    done = Launch(tmp_path).run("-m", "operator=fc2", "method=bulk", "num_sm=1,2", *SMALL)
    assert done.returncode == 1
    assert "fc2_dgrad takes none, ring_exchange" in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_that_do_not_divide_are_skipped(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = launch.run("-m", "tp_size=3,2", "method=none", *SMALL)
    assert done.returncode == 0
    statuses = {result.point["tp_size"]: (result.status, result.error) for result in launch.results().values()}
    assert statuses == {2: ("ok", None), 3: ("skipped", "fc1: 512 outputs do not divide by tp_size=3")}


def test_one_point_without_multirun_and_hydras_basic_launcher(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.run("method=ring_exchange", "operator=proj", *SMALL).returncode == 0
    assert launch.run("-m", "hydra/launcher=basic", "method=none", "tp_size=1", *SMALL).returncode == 0
    assert [result.status for result in launch.results().values()] == ["ok", "ok"]


def test_the_same_point_twice_is_measured_once(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = launch.run("-m", "num_sm=2,4,2", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "[2/2] ok" in done.stdout
    assert len(launch.results()) == 2


def test_two_points_in_one_directory_are_refused(tmp_path: Path) -> None:
    done = Launch(tmp_path).run("-m", "num_sm=2,4", "hydra.sweep.subdir=here", *SMALL)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: jobs 0 and 1 of the sweep differ and would both be written to here; "
        "give a hydra.sweep.subdir that tells them apart."
    )


def test_optuna_minimises_the_objective_unchanged(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = launch.run(
        "-m",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=3",
        "hydra.sweeper.direction=minimize",
        "method=choice(bulk,ring_exchange)",
        "num_sm=range(1,40)",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert found["best_value"] == min(result.objective_us or 1e9 for result in launch.results().values())
