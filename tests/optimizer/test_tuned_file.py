"""The tuner's file for a training of Megatron-LM: found where it was written, or tuned."""

import json
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.gpus import visible_gpus
from overlap_sweep.levers import named
from overlap_sweep.levers.programs import Command, options_of
from overlap_sweep.levers.training import Training
from overlap_sweep.optimizer import tuned_file
from overlap_sweep.optimizer.answer import Answer, in_lines
from overlap_sweep.optimizer.candidates import Allowed, Candidate, Recorded, candidates
from overlap_sweep.optimizer.tuned_file import Layers, layers_of, of_a_loop, tuner_files
from overlap_sweep.optimizer.workflow import _add_files
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime import own_command
from overlap_sweep.search.measured import Budget
from overlap_sweep.workloads.job import command
from tests.composed import composed
from tests.workloads.job.commands import point

SIZES = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --kv-channels=128 --seq-length 4096"
LLAMA = (
    f"pretrain_gpt.py --sequence-parallel --tensor-model-parallel-size 2 {SIZES} --micro-batch-size 2 --bf16 --swiglu "
    "--group-query-attention --num-query-groups 8 --normalization RMSNorm --disable-bias-linear"
)
"""The layers of the recorded tuning."""
TUNED = Path(__file__).parent.parent / "golden" / "expected" / "tuner"
FILE, REPORT = "optimal_tp_comm_overlap_cfg_tp2.yaml", "tuning_report.json"
H200 = "NVIDIA H200"
TUNE = """
import shutil, sys
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
open("asked", "w").write(" ".join(sys.argv[1:]))
print("the tuner's progress")
if "model.hidden_size=64" in sys.argv:
    sys.exit("error: no.")
folder = words["hydra.sweep.dir"].strip('"')
for name in ({file!r}, {report!r}):
    shutil.copy({tuned!r} + "/" + name, folder)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, on a machine with two GPUs, whose tuner has its answer ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    visible_gpus.cache_clear()
    (tmp_path / "tune.py").write_text(TUNE.format(file=FILE, report=REPORT, tuned=str(TUNED)))
    monkeypatch.setattr(own_command, "PROGRAM", (sys.executable, str(tmp_path / "tune.py")))
    return tmp_path


def training(line: str = LLAMA, *, libraries: tuple[str, ...] = ("transformer_engine",)) -> Training:
    return Training(libraries=libraries, words=shlex.split(f"torchrun --nproc-per-node 2 {line}"), override=True)


def layers(line: str) -> Layers:
    return layers_of(options_of("megatron", Command(shlex.split(line))))


def written(folder: Path) -> Path:
    """Puts the recorded tuning there, and returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TUNED / REPORT, folder)
    return Path(shutil.copy(TUNED / FILE, folder))


def test_layers_are_what_the_commands_options_say() -> None:
    found = layers(LLAMA)
    assert found.sizes == {
        **{"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_kv_heads": 8},
        **{"head_dim": 128, "gated_mlp": True},
    }
    assert (found.normalization, found.bias, found.precision) == ("RMSNorm", False, "bf16")
    assert (found.tokens, found.micro_batch_size, found.tp_size) == (8192, 2, 2)


def test_what_is_left_out_is_megatrons_default() -> None:
    line = "pretrain_gpt.py --tensor-model-parallel-size=4 --hidden-size 1024 --num-attention-heads 16 "
    line += "--seq-length 2048 --micro-batch-size 4 --context-parallel-size 2 --fp8-format hybrid"
    found = layers(line)
    assert (found.sizes["ffn_hidden_size"], found.sizes["num_kv_heads"], found.sizes["head_dim"]) == (4096, 16, 64)
    assert (found.normalization, found.bias, found.precision, found.tokens) == ("LayerNorm", True, "fp8_delayed", 4096)
    assert layers(f"{line} --swiglu").sizes["ffn_hidden_size"] == 2688


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (LLAMA.replace("--hidden-size 4096", ""), "the command gives no number after --hidden-size"),
        (LLAMA.replace("--seq-length 4096", "--seq-length $LENGTH"), "the command gives no number after --seq-length"),
        (f"{LLAMA} --num-experts 8", "with --num-experts its options do not say the widths of all layers"),
        (LLAMA.replace("-size 2 --hidden", "-size 1 --hidden"), "has no --tensor-model-parallel-size above 1"),
        (f"{LLAMA} --fp8-format e4m3 --fp8-recipe custom", "the tuner has no precision for --fp8-recipe custom"),
    ],
)
def test_what_is_not_known_is_not_guessed(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        layers(line)
    files, reason = tuner_files(training(line), H200, minutes=30)
    assert not files
    assert said in reason
    assert "`overlap-sweep tune MODEL tp_size=N workload.tokens=N` makes a file for" in reason
    assert not Path("asked").exists()


@pytest.mark.parametrize("where", [".", "multirun/found", "multirun/2026-11-22/05-13-00"])
def test_a_file_that_was_tuned_for_these_layers_is_found(folder: Path, where: str) -> None:
    path = written(folder / where)
    assert tuner_files(training(), H200, minutes=0) == ([path.relative_to(folder)], "")
    # A GPU of unknown kind may be of this kind.
    assert tuner_files(training(), "", minutes=0) == ([path.relative_to(folder)], "")


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        (LLAMA, "NVIDIA B200"),
        (LLAMA.replace("4096 --ffn", "2048 --ffn"), H200),
        (LLAMA.replace("--micro-batch-size 2", "--micro-batch-size 1"), H200),
        (LLAMA.replace("--bf16", "--fp16"), H200),
        (LLAMA.replace("-size 2 --hidden", "-size 4 --hidden"), H200),
    ],
)
def test_a_file_for_something_else_is_not(folder: Path, line: str, gpu: str) -> None:
    written(folder / "multirun" / "found")
    files, reason = tuner_files(training(line), gpu, minutes=0)
    assert not files
    assert reason.startswith(
        "none is written for these layers, and tuning it needs 6 of --minutes; `overlap-sweep tune"
    )


def test_a_file_alone_is_tried_besides_unless_its_head_names_something_else(folder: Path) -> None:
    shutil.copy(TUNED / FILE, folder)
    files, reason = tuner_files(training(), H200, minutes=0)
    assert (files, reason[:4]) == ([Path(FILE)], "none")
    assert tuner_files(training(), "NVIDIA B200", minutes=0)[0] == []
    # The same file as that of a report is one candidate.
    path = written(folder / "multirun" / "found")
    assert tuner_files(training(), H200, minutes=0) == ([path.relative_to(folder)], "")


def test_without_a_file_it_is_tuned_for_the_layers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (path,), reason = tuner_files(training(), H200, minutes=30)
    assert reason == ""
    assert path.read_bytes() == (TUNED / FILE).read_bytes()
    typed = Path("asked").read_text().split()
    assert typed[:2] == ["tune", "hf"]
    assert {"model.hidden_size=4096", "tp_size=2", "workload.tokens=8192", "search.max_minutes=2"} <= {*typed}
    # Standard output is for the answer alone.
    out, err = capfd.readouterr()
    assert "the tuner's progress" in err
    assert "the tuner's progress" not in out
    # The next time it is there.
    Path("asked").unlink()
    assert tuner_files(training(), H200, minutes=30) == ([path], "")
    assert not Path("asked").exists()


def test_the_tuner_takes_what_it_is_asked() -> None:
    _, *words = layers(LLAMA).words("pretrain_gpt")
    operator = composed("workload=operator", "model=hf", *[word for word in words if not word.startswith("layer.")])
    assert (operator.model.ffn_hidden_size, operator.model.bias, operator.tp_size) == (14336, False, 2)
    assert composed("workload=layer", "model=hf", *words).layer.micro_batch_size == 2


def test_why_it_cannot_be_tuned_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reason = tuner_files(training(LLAMA.replace("-size 2 --hidden", "-size 8 --hidden")), H200, minutes=30)
    assert reason.startswith("none is written for these layers, and tuning it needs 8 GPUs of this machine; `overlap-s")
    assert "model.num_kv_heads=8" in reason
    monkeypatch.setattr(tuned_file, "elsewhere", lambda: True)
    assert "2 GPUs of this machine" in tuner_files(training(), H200, minutes=30)[1]


def test_a_tuner_that_fails_is_a_reason() -> None:
    line = LLAMA.replace("--hidden-size 4096", "--hidden-size 64")
    assert tuner_files(training(line), H200, minutes=30) == ([], "overlap-sweep tune failed: no")


def test_what_the_command_has_itself_is_no_candidate(folder: Path) -> None:
    path = written(folder / "multirun" / "found")
    line = f"{LLAMA} --tp-comm-overlap --tp-comm-overlap-cfg {path}"
    files, reason = tuner_files(training(line), H200, minutes=0)
    assert not files
    assert reason.startswith("the command has it itself")


def test_that_no_overlap_is_fastest_is_an_answer(folder: Path) -> None:
    path = written(folder / "multirun" / "found")
    report = path.with_name(REPORT)
    content = json.loads(report.read_text())
    content["answers"][0]["use"] = []
    report.write_text(json.dumps(content))
    files, reason = tuner_files(training(), H200, minutes=30)
    assert (files, reason.partition(" (")[0]) == ([], "the tuner found no overlap that is faster than none")
    assert not Path("asked").exists()


def test_a_report_that_cannot_be_read_is_said_and_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(folder / "multirun" / "found")
    damaged = folder / "multirun" / "later" / REPORT
    damaged.parent.mkdir()
    damaged.write_text("{")
    assert tuner_files(training(), H200, minutes=0) == ([path.relative_to(folder)], "")
    assert "warning: multirun/later/tuning_report.json cannot be read" in capsys.readouterr().err


def test_a_loop_of_ones_own_has_its_sentence() -> None:
    loop = training("train.py")
    assert (
        "`overlap-sweep tune MODEL tp_size=4 workload.tokens=N` makes one for your own call of initialize_ub"
        in of_a_loop(loop, 4)
    )
    assert of_a_loop(loop, 1) == ""
    assert of_a_loop(training("train.py", libraries=("ddp",)), 4) == ""
    assert of_a_loop(training(), 2) == ""


def added(allow: Allowed, line: str = LLAMA, tp_size: int = 1) -> tuple[list[Candidate], dict[str, str], Budget]:
    """What is tried, and why not, of a training whose tensor parallelism is exposed."""
    recorded = Recorded(training(line), {"dependency": 0.2}, tp_size=tp_size)
    found, left_out = candidates(recorded, named(["megatron.tp_comm_overlap"]))
    first = Result(
        name="first",
        recorded=dict(point(f"job.command=torchrun {LLAMA}")),
        status="ok",
        environment={"gpu": H200},
    )
    budget = Budget(None, 30.0, began_s=time.monotonic() - 60)
    _add_files(found, left_out.not_here, recorded, first, budget, allow)
    return found, left_out.not_here, budget


def test_the_tuners_file_is_a_candidate_and_the_answer_says_how_to_give_it() -> None:
    (file, default), left_out, budget = added("rounding")
    assert (default.value, file.needs, left_out) == ("default", "rounding", {})
    assert file.in_words == "+7.6%, at most 20.0% (dependency)"
    assert Path("asked").exists()
    # The rate of runs is without the time of the tuner.
    assert 0 < budget.other_s < budget.elapsed_s - 60 + 1
    made = point(f"job.command=torchrun {LLAMA}", f"job.levers.{file.name}")
    given = f"--tp-comm-overlap --tp-comm-overlap-cfg {file.value} --tp-comm-overlap-rs-dgrad"
    assert command.command_line(made) == f"torchrun {LLAMA} {given}"


def test_what_is_not_allowed_is_not_tuned() -> None:
    (default,), left_out, _ = added("exact")
    assert (default.value, left_out, Path("asked").exists()) == ("default", {}, False)
    path = written(Path("multirun/found"))
    (file, _), _, _ = added("exact")
    assert file.value == str(path)


def test_why_none_is_tried_is_left_out() -> None:
    (default,), left_out, _ = added("rounding", f"{LLAMA} --num-experts 8")
    assert default.value == "default"
    assert left_out[tuned_file.OPTION].startswith("with --num-experts its options do not say")
    found, left_out, _ = added("rounding", "train.py", tp_size=2)
    assert not found
    assert left_out[tuned_file.OPTION].startswith("Megatron-LM is not found in the command (pretrain_*.py)")


def test_the_answer_says_why_no_file_was_tried() -> None:
    answer = Answer(
        **{"answer": "Keep the command as it is.", "settings": {}, "lines": [], "results": "equal", "stopped": ""},
        **{"gain": 0.0, "low": 0.0, "high": 0.0, "proven": False, "step_us": 1.0, "best_us": 1.0},
        **{"memory_gb": None, "memory_before_gb": None, "runs": 2, "minutes": 1.0, "cautions": []},
        **{"verdict": "keep", "seemed": {}},
        **{"trials": [], "not_allowed": [], "exposed": [], "left_out": {tuned_file.OPTION: "why; `this` makes it"}},
    )
    assert in_lines(answer, Path("report.html"))[-2] == "megatron.tp_comm_overlap=FILE: why; `this` makes it."
