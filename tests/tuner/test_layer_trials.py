"""The tuner's layer points: how they are told what to run, and how files and presets are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import overlap_cfg
from overlap_sweep.backends import transformer_engine
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import Result, Status, VariantTimes
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.rounds import Task
from overlap_sweep.tuner.layer_trials import (
    _holds_for_layers,
    case_word,
    check_presets,
    presets,
    seed_presets,
    write_config,
)
from overlap_sweep.tuner.workflow import _fastest_together
from tests.make_point import timing_of
from tests.points import operator_point


def task(**changes: Any) -> Task:
    return Task(operator_point(**changes), [], {}, Counter())


def test_what_is_said_of_operators_is_not_said_of_layers() -> None:
    of_layers = ("tp_size=4", "model=llama3_8b", "model.hidden_size=256", "runtime.device=cpu", "precision=bf16")
    of_layers += ("layer.micro_batch_size=2", "search.max_points=9", "+experiment=tp_overlap_tuner")
    of_layers += ("workload.tokens=64", "workload.repeats=3", "++workload.seed=1")
    of_operators = ("workload=operator", "workload.default_every_s=1", "operator=fc1", "profile=all", "+repetition=1")
    of_operators += ("phases={fprop:{method:none}}",)
    assert [override for override in (*of_layers, *of_operators) if _holds_for_layers(override)] == [*of_layers]


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("llama3_8b", "llama3_8b"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/tiny/config.json", "tiny"),
        ("/models/tiny/", "tiny"),
        ("/models/My model, é=(v2)/config.json", "My-model-v2-"),
    ],
)
def test_files_and_folders_have_plain_names(model: str, word: str) -> None:
    assert case_word(task(model={"name": model}, tp_size=4)) == f"{word}_tp4_torch_fp32_tokens128"


def test_cases_that_are_measured_apart_have_files_of_their_own() -> None:
    changes: list[dict[str, Any]] = [{}, {"tp_size": 4}, {"precision": "bf16"}, {"workload": {"tokens": 64}}]
    changes += [{"backend": "transformer_engine"}, {"model": {"name": "other"}}]
    assert len({case_word(task(**changed)) for changed in changes}) == len(changes)


def test_a_written_configuration_is_read_back_and_named_as_layers_know_it(tmp_path: Path) -> None:
    overlapped = OverlapConfig({"fc2_fprop": {"method": "pipeline", "num_sm": 4, "num_splits": 2}})
    overlapped.switches["tp_comm_bulk_dgrad"] = False
    for config in (overlapped, OverlapConfig()):
        name = write_config(tmp_path, "llama_tp2_0", config)
        assert name == f"file:{tmp_path / 'configs' / 'llama_tp2_0.yaml'}"
        assert overlap_cfg.read(Path(name.removeprefix("file:"))) == config


def write_preset(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_presets_are_named_after_their_files_and_may_depend_on_the_tp_size() -> None:
    assert presets(None, 4) == presets([], 4) == {}
    assert presets(["a/theirs_tp{tp}.yaml", "b.yaml"], 4) == {
        "preset theirs_tp4": "file:a/theirs_tp4.yaml",
        "preset b": "file:b.yaml",
    }
    assert presets(["~/mine.yaml"], 2) == {"preset mine": f"file:{Path.home()}/mine.yaml"}


def test_presets_of_the_same_name_cannot_be_told_apart(tmp_path: Path) -> None:
    paths = [write_preset(tmp_path / folder / "tp4.yaml", "fc1_fprop: {num_sm: 4}") for folder in ("a", "b")]
    check_presets([paths[0], paths[0]], ["4"])
    with pytest.raises(UserError, match="would have one name"):
        check_presets(paths, ["4"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("[1, 2]", "is no tp_comm_overlap_cfg"),
        ("fc9_fprop: {method: bulk}", "fc9_fprop is no slot"),
    ],
)
def test_a_preset_that_is_none_is_an_error(tmp_path: Path, text: str | None, says: str) -> None:
    if text:
        write_preset(tmp_path / "theirs_tp4.yaml", text)
    write_preset(tmp_path / "theirs_tp2.yaml", "fc1_fprop: {method: ring_exchange}")
    given = [str(tmp_path / "theirs_tp{tp}.yaml")]
    check_presets(None, ["2", "4"])
    check_presets(given, ["2"])
    with pytest.raises(UserError, match=says):
        check_presets(given, ["2", "4"])


def test_a_preset_is_only_measured_as_far_as_the_backend_can(tmp_path: Path) -> None:
    """Plain torch has no margin and no clusters on a CPU, which every whole setting of userbuffers has."""
    path = write_preset(tmp_path / "theirs.yaml", "fc2_fprop: {method: pipeline, num_sm: 7, num_splits: 2}\n")
    one = task(operator="fc2")
    for paths in ([path], None):
        seed_presets(one, paths)
        assert (one.seeds, one.cells) == ({}, {})


def test_what_presets_say_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is not named runs at the library's default, and so do knobs that are not; `none` is no candidate."""
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    path = write_preset(tmp_path / "theirs.yaml", "fc2_fprop: {method: none}\nfc1_dgrad: {method: bulk, num_sm: 7}\n")
    gpu: dict[str, Any] = {"backend": "transformer_engine", "precision": "bf16", "runtime": {"device": "cuda"}}
    fc1, fc2 = task(operator="fc1", **gpu), task(operator="fc2", **gpu)
    for one in (fc1, fc2):
        seed_presets(one, [path])
    bulk = {"method": "bulk", "cga_size": 2, "set_sm_margin": True}
    assert fc1.seeds["bwd"] == [Candidate.of({"fc1_dgrad": {**bulk, "num_sm": 7}, "fc1_wgrad": {**bulk, "num_sm": 16}})]
    assert [c.settings["fc1_fprop"]["method"] for c in fc1.seeds["fwd"]] == ["ring_exchange"]
    assert list(fc2.seeds) == ["bwd"]


ROUNDS = [100.0, 101.0, 99.0, 100.0, 102.0, 98.0, 100.0]
FASTER = [us * 0.97 for us in ROUNDS]
UNSURE = [us * ratio for us, ratio in zip(ROUNDS, (0.97, 1.02, 0.97, 1.01, 0.97, 1.02, 0.97), strict=True)]
Times = dict[str, list[float]]


def fastest(names: dict[str, str], samples_us: Times, launch_bound: tuple[str, ...] = ()) -> str | None:
    """Of a layer's variants with the times of their rounds, by name; without any the layer has failed."""
    variants = {
        name: VariantTimes(times={"all": timing_of(us)}, launch_bound=name in launch_bound)
        for name, us in samples_us.items()
    }
    status: Status = "ok" if variants else "failed"
    return _fastest_together(names, Result(name="together", point={}, status=status, variants=variants))


@pytest.mark.parametrize(
    ("samples_us", "launch_bound", "taken"),
    [
        ({"best": ROUNDS, "other": FASTER}, "", "other"),
        ({"best": FASTER, "other": ROUNDS}, "", "best"),
        ({"best": ROUNDS, "other": ROUNDS}, "", "best"),
        ({"best": ROUNDS, "other": UNSURE}, "", "best"),
        ({}, "", "best"),
        ({"best": ROUNDS}, "", "best"),
        ({"other": ROUNDS}, "", "other"),
        ({"best": ROUNDS, "other": FASTER}, "other", "best"),
        ({"best": ROUNDS, "other": FASTER}, "best", "other"),
        ({"best": ROUNDS, "other": FASTER}, "best other", "best"),
        ({"none": ROUNDS}, "", None),
    ],
)
def test_the_first_combination_is_kept_unless_another_is_faster_beyond_the_noise(
    samples_us: Times, launch_bound: str, taken: str | None
) -> None:
    assert fastest({"best": "best", "other": "other"}, samples_us, tuple(launch_bound.split())) == taken


def test_combinations_that_overlap_nothing_are_none() -> None:
    names = {"best of each slot": "none", "fc2 fwd by ring": "file:a.yaml"}
    assert fastest(names, {"none": ROUNDS, "file:a.yaml": FASTER}) == "fc2 fwd by ring"
