"""The tuner's layer points: how they are told what to run, and how files and presets are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import overlap_cfg
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import Result, VariantTimes
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


@pytest.mark.parametrize(
    ("override", "holds"),
    [
        ("tp_size=4", True),
        ("model=llama3_8b", True),
        ("model.hidden_size=256", True),
        ("runtime.device=cpu", True),
        ("precision=bf16", True),
        ("layer.micro_batch_size=2", True),
        ("search.max_points=9", True),
        ("+experiment=tp_overlap_tuner", True),
        ("workload.tokens=64", True),
        ("workload.repeats=3", True),
        ("++workload.seed=1", True),
        ("workload=operator", False),
        ("workload.default_every_s=1", False),
        ("operator=fc1", False),
        ("phases={fprop:{method:none}}", False),
        ("profile=all", False),
        ("+repetition=1", False),
    ],
)
def test_what_is_said_of_operators_is_not_said_of_layers(override: str, holds: bool) -> None:
    assert _holds_for_layers(override) is holds


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
    found = case_word(task(model={"name": model}, tp_size=4))
    assert found.startswith(f"{word}_tp4_")
    assert found.endswith("_fp32_tokens128")


def test_cases_that_are_measured_apart_have_files_of_their_own() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"tp_size": 4},
        {"precision": "bf16"},
        {"workload": {"tokens": 64}},
        {"backend": "transformer_engine"},
        {"model": {"name": "other"}},
    ]
    assert len({case_word(task(**changed)) for changed in changes}) == len(changes)


def test_a_written_configuration_is_read_back_and_named_as_layers_know_it(tmp_path: Path) -> None:
    config = OverlapConfig({"fc2_fprop": {"method": "pipeline", "num_sm": 4, "num_splits": 2}})
    config.switches["tp_comm_bulk_dgrad"] = False
    name = write_config(tmp_path, "llama_tp2_0", config)
    assert name == f"file:{tmp_path / 'configs' / 'llama_tp2_0.yaml'}"
    assert overlap_cfg.read(Path(name.removeprefix("file:"))) == config
    assert write_config(tmp_path, "llama_tp2_0", OverlapConfig()) == name
    assert overlap_cfg.read(Path(name.removeprefix("file:"))) == OverlapConfig()


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
    with pytest.raises(UserError, match="would have one name in the report; rename one"):
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
    path = tmp_path / "theirs_tp4.yaml"
    if text:
        path.write_text(text)
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
    seed_presets(one, [path])
    assert (one.seeds, one.cells) == ({}, {})
    seed_presets(one, None)
    assert one.seeds == {}


def test_what_presets_say_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is not named runs at the library's default, and so do knobs that are not; `none` is no candidate."""
    from overlap_sweep.backends import transformer_engine

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


def layer(launch_bound: tuple[str, ...] = (), **samples_us: list[float]) -> Result:
    """Variants under their labels' names, with the times of their rounds."""
    variants = {
        label: VariantTimes(times={"all": timing_of(us)}, launch_bound=label in launch_bound)
        for label, us in samples_us.items()
    }
    return Result(name="together", point={}, status="ok", variants=variants)


NAMES = {"best": "best", "other": "other"}


def test_the_first_combination_is_kept_unless_another_is_faster_beyond_the_noise() -> None:
    rounds = [100.0, 101.0, 99.0, 100.0, 102.0, 98.0, 100.0]
    faster = [us * 0.97 for us in rounds]
    unsure = [us * ratio for us, ratio in zip(rounds, (0.97, 1.02, 0.97, 1.01, 0.97, 1.02, 0.97), strict=True)]
    assert _fastest_together(NAMES, layer(best=rounds, other=faster)) == "other"
    assert _fastest_together(NAMES, layer(best=faster, other=rounds)) == "best"
    assert _fastest_together(NAMES, layer(best=rounds, other=rounds)) == "best"
    assert _fastest_together(NAMES, layer(best=rounds, other=unsure)) == "best"


def test_of_combinations_that_were_not_measured_none_is_taken() -> None:
    rounds = [100.0, 101.0, 99.0]
    faster = [us * 0.9 for us in rounds]
    assert _fastest_together(NAMES, Result(name="together", point={}, status="failed")) == "best"
    assert _fastest_together(NAMES, layer(best=rounds)) == "best"
    assert _fastest_together(NAMES, layer(other=rounds)) == "other"
    assert _fastest_together(NAMES, layer(best=rounds, other=faster, launch_bound=("other",))) == "best"
    assert _fastest_together(NAMES, layer(best=rounds, other=faster, launch_bound=("best",))) == "other"
    assert _fastest_together(NAMES, layer(best=rounds, other=faster, launch_bound=("best", "other"))) == "best"


def test_combinations_that_overlap_nothing_are_none() -> None:
    rounds = [100.0, 101.0, 99.0, 100.0, 100.0, 100.0]
    names = {"best of each slot": "none", "fc2 fwd by ring": "file:a.yaml"}
    result = Result(
        name="together",
        point={},
        status="ok",
        variants={
            "none": VariantTimes(times={"all": timing_of(rounds)}),
            "file:a.yaml": VariantTimes(times={"all": timing_of([us * 0.9 for us in rounds])}),
        },
    )
    assert _fastest_together(names, result) == "fc2 fwd by ring"
