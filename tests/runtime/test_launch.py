"""launch.py end to end on the CPU: real processes, real collectives, real traces."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from overlap_sweep.results.run_directory import Result, is_trace_of, trace_file
from tests.faults.injection import faulty_launch
from tests.sweeps import SMALL, Launch, wait_for

pytestmark = pytest.mark.end_to_end

Swept = tuple[Launch, subprocess.CompletedProcess[str]]


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
    assert (result.status, result.recorded["backend"]) == ("ok", "torch")
    assert str(result.measured.attention_backend).endswith("(torch)")
    assert list(result.measured.variants) == ["none", variant, "ring_exchange", "floor"]
    assert result.measured.variants[variant].settings["fc2_fprop"] == {
        "method": "pipeline",
        "num_sm": 2,
        "num_splits": 2,
    }
    assert not result.measured.variants[variant].switches["tp_comm_overlap_rs"]
    for name in (variant, "ring_exchange"):
        assert max(result.measured.variants[name].relative_error.values()) < 1e-4
    assert "trace_none_rank1.json.gz" in result.traces
    assert all((tmp_path / "single" / trace).stat().st_size > 0 for trace in result.traces)
    (warning,) = result.warnings
    assert warning.startswith("default was not measured: backend=torch has no default overlap of its own")
    assert {"none", "ring_exchange", "floor"} <= {(line.split() or [""])[0] for line in done.stdout.splitlines()}
    assert "file:tuned.yaml" in done.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A grid with sensible and senseless points, at two world sizes."""
    launch = Launch(tmp_path_factory.mktemp("sweep"))
    return launch, launch.run(
        "-m", "tp_size=4,3,2", "operator=fc1,fc2", "method=bulk,ring_exchange", *SMALL, "report=true"
    )


def ok_results(launch: Launch) -> dict[str, Result]:
    return {name: result for name, result in launch.results().items() if result.status == "ok"}


def test_a_grid_measures_what_makes_sense_and_tells_in_plain_lines(swept: Swept) -> None:
    launch, done = swept
    assert done.returncode == 0, done.stderr
    points = [result.recorded for result in ok_results(launch).values()]
    sensible = [("fc1", "bulk"), ("fc1", "ring_exchange"), ("fc2", "ring_exchange")]
    assert sorted((point["tp_size"], point["operator"], point["method"]) for point in points) == [
        (tp_size, *one) for tp_size in (2, 4) for one in sensible
    ]
    first, *lines = [line for line in done.stdout.splitlines() if not line.startswith("...")]
    assert first == (
        f"operator qwen3_0_6b, 32 tokens, 12 points on the CPU (the answer holds for this CPU only): {launch.directory}"
    )
    assert [line[: len("[ 1/12]")] for line in lines[:12]] == [f"[{n:2}/12]" for n in range(1, 13)]
    assert ["left" in line for line in lines[:12]] == [False, *[True] * 10, False]
    # Points of one world size follow each other.
    sizes = [line.partition("_tp")[2][:1] for line in lines[:12]]
    assert sizes == sorted(sizes)
    # The answer is that of the analysis, whose files are there.
    report = launch.directory / "report.html"
    assert lines[-1] == f"6 ok, 6 skipped; next: open {report}"
    assert report.is_file()
    headlines = [
        answer["headline"] for answer in json.loads((report.parent / "tuning_report.json").read_text())["answers"]
    ]
    assert len(headlines) == 2
    assert all(any(headline in line for line in lines) for headline in headlines)
    assert "\x1b" not in done.stdout


def test_the_run_directory_says_what_was_measured_on_what(swept: Swept) -> None:
    launch, _ = swept
    tp1_of_fc1 = []
    for name, result in ok_results(launch).items():
        directory = launch.directory / name
        assert (directory / ".hydra" / "config.yaml").exists()
        assert yaml.safe_load((directory / "tp_comm_overlap_cfg.yaml").read_text()) == result.settings
        ranks = range(result.recorded["tp_size"])
        none = [name for name in result.traces if is_trace_of("none", name)]
        assert result.traces == [*(f"trace_rank{rank}.json.gz" for rank in ranks), *none]
        # One point of every group has a trace of no overlap beside its own.
        assert none in ([], [f"trace_none_rank{rank}.json.gz" for rank in ranks])
        assert all((directory / trace).stat().st_size > 0 for trace in result.traces)
        assert not [path for path in directory.iterdir() if "tmp" in path.name]
        assert set(result.measured.times) == {"fwd", "bwd", "all"}
        for times in result.measured.times.values():
            for timing in (times.point, times.none, times.floor, times.tp1):
                assert timing is not None
                assert len(timing.samples_us) == 3
                assert 0 < timing.q1_us <= timing.median_us <= timing.q3_us
        assert result.recorded["precision"] == "fp32"
        assert set(result.relative_error) == {"output", "input_grad", "weight_grad", "bias_grad"}
        assert result.environment["packages"]["torch"]
        variables = {"UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        assert variables.items() <= result.environment["variables"].items()
        assert {"before", "after"} == set(result.conditions)
        if (result.recorded["tp_size"], result.recorded["operator"]) == (2, "fc1"):
            tp1_of_fc1.append(result.measured.times["fwd"].tp1)
    # The group stays alive from point to point: what depends on no knob is measured once.
    first, second = tp1_of_fc1
    assert first == second


def test_only_the_best_so_far_are_profiled_and_a_point_that_is_given_twice_is_measured_once(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    done = launch.run("-m", "num_sm=1,2,3,2,4,5,6", "profile=best", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "[6/6] ok" in done.stdout
    results = sorted(launch.results().items(), key=lambda item: item[1].recorded["num_sm"])
    assert [result.earlier_attempts for _, result in results] == [[]] * 6
    relative = [
        result.measured.times["bwd"].point.median_us / result.measured.times["bwd"].none.median_us
        for _, result in results
    ]
    # Which ones they are, the noise of the machine decides; that it was they, their own times show.
    profiled = [time <= min([1.0, *relative[:at]]) * 1.01 for at, time in enumerate(relative)]
    of_point, of_none = (sorted(trace_file(rank, name) for rank in (0, 1)) for name in ("", "none"))
    expected = [(of_point if any(profiled[:at]) else of_none + of_point) if profiled[at] else [] for at in range(6)]
    assert [sorted(result.traces) for _, result in results] == expected, relative
    written = [sorted(path.name for path in (launch.directory / name).glob("trace*")) for name, _ in results]
    assert written == expected


def test_hydras_own_launcher_runs_a_sweep_too(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path, light=True)
    assert launch.run("-m", "hydra/launcher=basic", "method=none", "tp_size=1", *SMALL).returncode == 0
    assert [result.status for result in launch.results().values()] == ["ok"]


def test_optuna_minimises_the_objective_unchanged(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path, light=True)
    options = [f"hydra.sweeper.{option}" for option in ("n_trials=3", "n_jobs=3", "direction=minimize")]
    grid = ("method=choice(bulk,ring_exchange)", "num_sm=range(1,40)")
    done = launch.run("-m", "hydra/sweeper=optuna", *options, *grid, *SMALL)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load((launch.directory / "optimization_results.yaml").read_text())
    assert found["best_value"] == min(result.objective_us or 1e9 for result in launch.results().values())


def test_a_launch_whose_output_nobody_reads_ends_like_other_programs_and_leaves_no_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    process = launch.start("-m", "tp_size=2", "method=bulk", "num_sm=1,2", *SMALL)
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline().startswith("operator ")
    process.stdout.close()
    assert process.wait(60) == -signal.SIGPIPE
    assert process.stderr.read() == ""
    wait_for(lambda: not launch.agents(), 10)
