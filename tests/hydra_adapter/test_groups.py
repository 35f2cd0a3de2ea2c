"""tp_size, operator, method and num_sm are Hydra's config groups, with files; any number is a choice, with or without a
file."""

import copy
from pathlib import Path

import pytest
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.hydra_adapter.composition import as_was_typed, compose_point
from overlap_sweep.hydra_adapter.help import choices, sentences
from overlap_sweep.hydra_adapter.overrides import NUMBERED, as_choice, as_typed
from overlap_sweep.options import options_of
from tests.composed import hydra, multirun
from tests.sweeps import ROOT, launch_here

CARD = ("tp_size", "operator", "method", "num_sm")
SETS = {"ring_exchange": {"aggregate": False}, "pipeline": {"num_splits": 4}}
"""What a choice sets besides the option of its group's name."""
DEEP = "# @package _global_\n# Eight SMs in clusters of two.\nnum_sm: 8\ncga_size: 2\n"
EXPERIMENT = "# @package _global_\nnum_sm: 5\ntp_size: 4\n"
OVERRIDING = "# @package _global_\ndefaults:\n  - override /num_sm: '5'\n  - override /tp_size: '4'\n"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[ConfigLoader, DictConfig]:
    folder = tmp_path_factory.mktemp("conf")
    for name, text in {"num_sm/deep": DEEP, "experiment/sets": EXPERIMENT, "experiment/overrides": OVERRIDING}.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    loader, config = copy.deepcopy(multirun())
    loader.get_search_path().prepend("mine", str(folder))
    loader.repository.initialize_sources(loader.get_search_path())  # type: ignore[attr-defined]
    return loader, config


@pytest.mark.parametrize("group", CARD)
def test_each_file_has_a_sentence_and_sets_what_it_is_called(group: str) -> None:
    loader = hydra().config_loader
    found, said = choices(loader, group), sentences(loader, group)
    assert set(found) == {path.stem for path in (ROOT / "conf" / group).iterdir()}
    assert set(said) == set(found)
    assert all(sentence.endswith(".") for sentence in said.values())
    for choice in found:
        value = int(choice) if group in NUMBERED else choice
        assert yaml.safe_load((ROOT / f"conf/{group}/{choice}.yaml").read_text()) == {
            group: value,
            **SETS.get(choice, {}),
        }
    if group in NUMBERED:
        assert found == sorted(found, key=int)
    else:
        options = {option.name: option for option in options_of(workloads.schema("operator"))}
        assert set(found) == {*options[group].choices}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (2, 4, None)),
        (("num_sm=37", "tp_size=3"), (3, 37, None)),
        (("num_sm=deep",), (2, 8, 2)),
        (("num_sm=deep", "num_sm=3"), (2, 3, None)),
        (("+experiment=sets",), (4, 5, None)),
        (("+experiment=sets", "num_sm=7"), (4, 7, None)),
        (("+experiment=sets", "num_sm=7", "~phase"), (4, 7, None)),
        (("+experiment=overrides",), (4, 5, None)),
        (("+experiment=overrides", "num_sm=7", "method=none"), (4, 7, None)),
        (("tp_size='4'", 'num_sm="6"'), (4, 6, None)),
    ],
)
def test_a_choice_is_loaded_and_wins_in_a_point_and_in_a_sweep(
    sweep: tuple[ConfigLoader, DictConfig], overrides: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    loader, config = sweep
    single = loader.load_configuration("config", list(map(as_choice, overrides)), RunMode.RUN)
    for composed in (compose_point(loader, config, overrides), as_was_typed(single)):
        assert (composed.tp_size, composed.num_sm, composed.cga_size) == expected
        assert list(composed.hydra.overrides.task) == list(map(as_typed, overrides))
    if any(override.startswith("num_sm=") for override in overrides):
        (*_, last) = (override for override in map(as_typed, overrides) if override.startswith("num_sm="))
        assert f"num_sm={compose_point(loader, config, overrides).hydra.runtime.choices['num_sm']}" == last


@pytest.mark.parametrize("typed", ["num_sm=4", "tp_size=null", "num_sm=-1", "tp_size=8", "num_sm=1.5", "+num_sm=3"])
def test_hydra_is_given_a_text_and_everything_else_what_was_typed(typed: str) -> None:
    key, _, value = typed.partition("=")
    assert as_choice(typed) == f"{key}='{value}'"
    assert as_choice(as_choice(typed)) == as_choice(typed)
    assert as_typed(as_choice(typed)) == typed


@pytest.mark.parametrize(
    "typed", ["num_sm=1,2", "num_sm=range(1,33)", "num_smm=4", "search.max_num_sm=4", "~num_sm", "num_sm"]
)
def test_other_words_are_left_alone(typed: str) -> None:
    assert as_choice(typed) == as_typed(typed) == typed


def test_names_and_records_of_a_point_are_as_typed(tmp_path: Path) -> None:
    """What Hydra's own launcher is given has quotes; nothing else has."""
    given = ("backend=transformer_engine", "workload=layer", "runtime.device=cpu")
    launch_here("-m", "num_sm=range(3,5)", "tp_size=2", *given, f"hydra.sweep.dir={tmp_path}/ours")
    launch_here("-m", "num_sm=3,4", "tp_size=2", *given, f"hydra.sweep.dir={tmp_path}/hydras", "hydra/launcher=basic")
    launch_here("num_sm=3", "tp_size=2", *given, f"hydra.run.dir={tmp_path}/one")
    ours, hydras = (
        sorted(path.parent.name for path in (tmp_path / folder).glob("*/result.json")) for folder in ("ours", "hydras")
    )
    assert ours == hydras
    assert len(ours) == 2
    for name in (f"ours/{ours[0]}", "one"):
        assert yaml.safe_load((tmp_path / name / ".hydra/overrides.yaml").read_text())[:2] == ["num_sm=3", "tp_size=2"]
