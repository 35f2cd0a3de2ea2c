"""`tune` and its report: how the command line is made of arguments, and a whole run of it in real processes on gloo."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

import overlap_sweep
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.results.records import TunerRecord
from overlap_sweep.results.run_directory import read_result
from overlap_sweep.runtime import own_command
from overlap_sweep.tuner import EXPERIMENT
from tests.analyze import analyze
from tests.composed import SIZES


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What launch.py was asked to do, which is not run."""
    found: list[str] = []

    def run(command: list[str], *, quiet: bool) -> None:
        assert command[1:6] == ["-m", "overlap_sweep", "launch", "-m", EXPERIMENT]
        assert not quiet
        found.extend(command[6:])

    monkeypatch.setattr("overlap_sweep.runtime.own_command.run", run)
    monkeypatch.setattr("overlap_sweep.tuner.Report", lambda directory: SimpleNamespace(directory=directory))
    return found


def test_options_are_those_of_the_command_line(arguments: list[str]) -> None:
    report = overlap_sweep.tune(
        "llama3_8b",
        tp_size=(2, 4),
        tokens=4096,
        operator=["fc1", "qkv"],
        method="bulk",
        num_sm=range(1, 4),
        max_points=None,
        max_minutes=2.5,
        presets=["a b.yaml", Path("c_tp{tp}.yaml")],
        prove=False,
        profile="all",
        output_dir="out/here",
        overrides=["search.repeats=2"],
        **{"workload.repeats": 3},
    )
    assert report.directory == Path("out/here")
    assert arguments == [
        *("model=llama3_8b", "tp_size=2,4", "workload.tokens=4096", "operator=fc1,qkv", "method=bulk", "num_sm=1,2,3"),
        *("search.max_minutes=2.5", 'tuner.presets=["a b.yaml","c_tp{tp}.yaml"]', "tuner.prove=false", "profile=all"),
        *("workload.repeats=3", 'hydra.sweep.dir="out/here"', "search.repeats=2"),
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpsize", "tune has no option tpsize. Did you mean tp_size?"),
        ("operators", "tune has no option operators. Did you mean operator?"),
        ("max_minute", "tune has no option max_minute. Did you mean max_minutes?"),
        ("colour", "tune has no option colour. See overlap-sweep launch --help."),
        ("repeats", "There are several options repeats: give one of workload.repeats or search.repeats in `overrides`"),
    ],
)
def test_an_unknown_option_gets_the_nearest(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        overlap_sweep.tune("llama3_8b", **{name: 2})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3_0_6b", ["model=qwen3_0_6b"]),
        ("Qwen/Qwen3-0.6B", ["model=hf", 'model.name="Qwen/Qwen3-0.6B"']),
        ("/my models, (é)/config.json", ["model=hf", 'model.name="/my models, (é)/config.json"']),
    ],
)
def test_a_model_is_one_of_ours_or_of_hugging_face(arguments: list[str], model: str, said: list[str]) -> None:
    report = overlap_sweep.tune(model, tp_size=4)
    # What is left open is the experiment's to say.
    where = f'hydra.sweep.dir="{report.directory}"'
    assert arguments == [*said, "tp_size=4", where]
    assert report.directory.parts[0] == "multirun"


def test_what_is_exported_is_offered() -> None:
    assert set(overlap_sweep.__all__) <= set(dir(overlap_sweep))
    assert all(getattr(overlap_sweep, name) for name in overlap_sweep.__all__)
    with pytest.raises(AttributeError, match="no attribute tuner_of_pianos"):
        overlap_sweep.tuner_of_pianos  # noqa: B018


@pytest.mark.end_to_end
def test_a_model_is_tuned_and_the_answer_is_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A path as people have them.
    directory = tmp_path / "tuned" / "12-00-00"
    preset = tmp_path / "theirs.yaml"
    preset.write_text("fc2_fprop: {method: ring_exchange, num_sm: 2}\nfc2_dgrad: {method: ring_exchange, num_sm: 2}\n")
    space = ("method=ring_exchange,pipeline", "num_sm=1", "aggregate=false", "num_splits=2")
    report = overlap_sweep.tune(
        "qwen3_0_6b",
        max_tp_size=2,
        operator="fc2",
        tokens=64,
        device="cpu",
        presets=[preset],
        output_dir=directory,
        overrides=[*SIZES, "workload.repeats=3", "profile=none", *space],
        quiet=True,
    )
    assert capfd.readouterr() == ("", "")
    # The whole layer is proven side by side.
    (trial,) = TunerRecord.read(directory / "tuner.json").proofs
    assert list(trial.variants) == ["none", "default", "tuned", "preset theirs"]
    result = read_result(directory / trial.point / "result.json")
    assert (result.status, result.recorded["tp_size"]) == ("ok", 2), result.error
    assert result.recorded["workload"] | {"name": "layer", "tokens": 64, "repeats": 3} == result.recorded["workload"]
    proof = report.proof[2]
    assert proof.reason is None
    assert {"none", "tuned", "preset theirs", "floor"} <= set(proof.variants)
    # Plain torch has none.
    assert "default" not in proof.variants
    assert proof.recommended in ("none", "tuned", "preset theirs")
    # The report says what the files say.
    assert {(best.tp_size, best.slot) for best in report.best} >= {(2, "fc2_fprop"), (2, "fc2_dgrad")}
    assert proof.verdict in str(report.recommendations[0])
    assert any("fc2 fwd" in str(sentence) for sentence in report.recommendations)
    assert set(report.to_frame()["operator"]) == {"fc2"}
    slots = yaml.safe_load(report.yaml(2).read_text()) or {}
    config = overlap_cfg.read(directory / "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert report.ub_cfgs(2) == (slots if config.switches["tp_comm_overlap"] else None)
    with pytest.raises(UserError, match="no file for TP=8"):
        report.ub_cfgs(8)
    saved = report.save(tmp_path / "results" / "tiny")
    files = {"summary.txt", "tuning_report.json", "points.parquet", "search.json", "tuner.json"}
    files |= {"optimal_tp_comm_overlap_cfg_tp2.yaml", "ub_cfgs_tp2.json", "megatron_bridge_preset_tp2.py"}
    assert {path.name for path in saved} >= files
    assert all(path.parent == tmp_path / "results" / "tiny" and path.stat().st_size for path in saved)
    assert (directory / "report.html").stat().st_size > 0
    compile((directory / "megatron_bridge_preset_tp2.py").read_text(), "preset", "exec")
    assert overlap_sweep.Report(tmp_path / "results" / "tiny").best == report.best
    # Analysis says the same.
    assert analyze(directory).returncode == 0
    after = overlap_sweep.Report(directory)
    assert (after.proof[2].verdict, after.ub_cfgs(2)) == (proof.verdict, report.ub_cfgs(2))


@pytest.mark.end_to_end
def test_the_attention_of_a_mixture_of_experts_is_tuned_and_proven(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    AutoConfig.for_model("mixtral", **sizes).save_pretrained(tmp_path / "mixtral")
    report = overlap_sweep.tune(
        str(tmp_path / "mixtral"),
        max_tp_size=2,
        tokens=64,
        device="cpu",
        output_dir=tmp_path / "tuned",
        overrides=["workload.repeats=3", "profile=none", "method=ring_exchange", "num_sm=1", "aggregate=false"],
        quiet=True,
    )
    assert {best.operator for best in report.best} == {"qkv", "proj"}
    assert report.proof[2].recommended
    (case,) = report.cases
    assert case.applies_to[0] == "Applies to the attention (qkv, proj) of all 6 layers."
    assert case.applies_to[0] in report.yaml(2).read_text()
    assert not any("fc" in slot.slot for slot in report.unmeasured_slots)


def test_its_own_reason_is_the_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as caught:
        overlap_sweep.tune("llama3_8b", operator="fc3", device="cpu", output_dir=tmp_path / "tuned")
    assert str(caught.value) == "operator=fc3 is not known; choose one of fc1, fc2, proj, qkv."
    assert capfd.readouterr().err == f"error: {caught.value}\n"
    assert not (tmp_path / "tuned").exists()


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("llama3_8b", {"max_tp_size": 1}, "max_tp_size=1 leaves no communication to overlap"),
        ("llama3_8b", {"tp_size": 3}, "attention heads are not divisible by tp_size=3"),
        ("llama3_8b", {"max_minutes": "five"}, "search.max_minutes=five is not a number"),
        ("no/such/model", {}, "no/such/model is neither a path nor a Hugging Face name"),
        ("llama3_8c", {}, "Did you mean llama3_8b?"),
    ],
)
def test_whatever_went_wrong_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError) as caught:
        overlap_sweep.tune(model, device="cpu", output_dir=tmp_path / "tuned", quiet=True, **options)
    assert reason in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('error: too few', file=sys.stderr); print('2 ok', file=sys.stderr); sys.exit(1)", "too few"),
        ("sys.exit('no more memory')", "no more memory"),
        ("sys.exit(7)", "The command failed without a message; it was run as: "),
    ],
)
def test_the_reason_is_the_error_line_or_else_the_last(script: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        own_command.run([sys.executable, "-c", f"import sys; {script}"], quiet=True)
    assert str(caught.value).startswith(reason)


INTERRUPTED = """
import sys
from overlap_sweep.runtime import own_command
own_command.ENDING_S = 0.2
child = "import time\\ntry:\\n  print('begun', flush=True); time.sleep(60)\\nfinally: print('tidied up', flush=True)"
listening = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\\n"
own_command.run([sys.executable, "-c", listening + child], quiet=False)
"""


@pytest.mark.parametrize("whole_group", [True, False])
def test_an_interruption_ends_the_tuner_in_its_own_way(whole_group: bool) -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as run:
        assert run.stdout
        assert run.stdout.readline() == "begun\n"
        # A terminal interrupts the tuner, too; what interrupts only Python leaves it running.
        (os.killpg if whole_group else os.kill)(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert out == "tidied up\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
