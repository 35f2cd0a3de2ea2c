"""What a point takes over from files: digests of those that it depends on, and the content of a tp_comm_overlap_cfg."""

import shlex
from pathlib import Path

import pytest

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import FLAGS, SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import SETTINGS_FILE
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.operator.exports import megatron_yaml
from tests.workloads.job.commands import point, refusal

MEGATRON = "job.command=torchrun pretrain_gpt.py {overlap:megatron} --x"
CONFIGS = ("job.command=python t.py --config {config}", "+job.values.config=a.yaml")
SLOTS = {"fc1_dgrad": {"method": "bulk", "num_sm": 4}, "proj_fprop": {"method": "ring_exchange"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(path: Path, slots: dict[str, overlap_cfg.space.Setting] = SLOTS, **switches: bool) -> str:
    """As analyze.py writes it."""
    path.write_text(megatron_yaml(OverlapConfig(slots, {**SWITCH_DEFAULTS, **switches}), ["Measured."]))
    return f"+job.values.overlap={path.name}"


def test_a_point_is_another_one_when_its_script_or_a_file_that_a_value_names_changes(folder: Path) -> None:
    keys = [point_key(point(*CONFIGS))]
    for name in ("t.py", "a.yaml"):
        for text in ("one", "two"):
            (folder / name).write_text(text)
            keys.append(point_key(point(*CONFIGS)))
    assert len({*keys}) == 5
    (folder / "a.yaml").write_text("one")
    assert point_key(point(*CONFIGS)) == keys[3]
    assert {*point(*CONFIGS).job.files} == {"t.py", "a.yaml"}


def test_equal_files_are_equal_points_wherever_they_lie(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for name in ("here", "there"):
        (folder / name / "work").mkdir(parents=True)
        (folder / name / "work" / "t.py").write_text("one")
        (folder / name / "a.yaml").write_text("one")
        monkeypatch.chdir(folder / name)
        made = point(*CONFIGS, "job.directory=work")
        assert {*made.job.files} == {"t.py", "a.yaml"}
        keys.append(point_key(made))
    assert keys[0] == keys[1]


def test_values_that_are_no_files_are_no_files(folder: Path) -> None:
    (folder / "sub").mkdir()
    for value in ("sub", "x" * 5000, "25", "~nobody/x"):
        assert point(CONFIGS[0], f"+job.values.config='{value}'").job.files == {}


def test_megatrons_arguments_are_those_of_none_default_or_a_file(folder: Path) -> None:
    tuned = exported(folder / "optimal_tp2.yaml", tp_comm_bulk_wgrad=False, tp_comm_overlap_ag=False)
    words = {
        "+job.values.overlap=none": [],
        "+job.values.overlap=null": [],
        "+job.values.overlap=default": ["--tp-comm-overlap"],
        tuned: [
            *("--tp-comm-overlap", "--tp-comm-overlap-cfg", str(command.handed(folder / "a run") / SETTINGS_FILE)),
            *("--disable-tp-comm-overlap-ag", "--disable-tp-comm-bulk-wgrad"),
        ],
        exported(folder / "off.yaml", {}, tp_comm_overlap=False): [],
    }
    for typed, expected in words.items():
        made = point(MEGATRON, typed, "job.attach=false")
        run = folder / "a run"
        assert command.arguments(made, run) == ["torchrun", "pretrain_gpt.py", *expected, "--x"], typed
        assert workloads.of(made).refusal(made) is None
        assert len(workloads.of(made).overlap_configs(made)) == (typed == tuned)
    (config,) = workloads.of(made := point(MEGATRON, tuned)).overlap_configs(made).values()
    assert config.slots == SLOTS
    # In quotes it is one word, for a shell.
    made = point("job.command=bash -c 'x {overlap:megatron}'", tuned)
    assert shlex.split(command.arguments(made, folder / "a run")[2]) == ["x", *words[tuned]]


def test_the_file_is_found_from_the_working_folder_and_from_here_and_its_content_is_the_point_s(folder: Path) -> None:
    (folder / "work").mkdir()
    near = exported(folder / "work" / "near.yaml")
    made = point(MEGATRON, near, "job.directory=work")
    assert point(MEGATRON, exported(folder / "far.yaml"), "job.directory=work")["overlap_cfg"]["slots"] == SLOTS
    exported(folder / "work" / "near.yaml", {})
    assert point_key(point(MEGATRON, near, "job.directory=work")) != point_key(made)
    assert workloads.of(made).overlap_configs(made)[""].slots == SLOTS


def test_every_switch_with_a_flag_can_be_set_and_the_others_are_refused(folder: Path) -> None:
    scattering = {f"{operator}_dgrad": {"method": "ring_exchange"} for operator in ("qkv", "fc1")}
    for name, default in SWITCH_DEFAULTS.items():
        if name == "tp_comm_overlap":
            continue
        slots = scattering if name == "tp_comm_overlap_rs_dgrad" else {}
        typed = exported(folder / f"{name}.yaml", slots, **{name: not default})
        if name in FLAGS:
            assert FLAGS[name] in command.arguments(point(MEGATRON, typed), folder)
            assert refusal(MEGATRON, typed) is None
        else:
            assert refusal(MEGATRON, typed) == (
                f"Megatron-LM has no argument for {name}={not default}; set it in its TransformerConfig"
            )


def test_files_that_transformer_engine_would_not_take_are_refused_as_elsewhere(folder: Path) -> None:
    slots = exported(folder / "slots.yaml", {"fc1_fprop": {"method": "bulk"}})
    assert refusal(MEGATRON, slots) == "fc1_fprop takes ring_exchange, not bulk"
    switches = exported(folder / "switches.yaml", {}, tp_comm_overlap_rs_dgrad=True)
    assert str(refusal(MEGATRON, switches)).startswith("tp_comm_overlap_rs_dgrad applies to qkv and fc1 alike")
    (folder / "broken.yaml").write_text("fc9_fprop: {method: bulk}")
    with pytest.raises(UserError, match="fc9_fprop is not a slot"):
        point(MEGATRON, "+job.values.overlap=broken.yaml")
    with pytest.raises(
        UserError, match=r"job\.values\.overlap=missing\.yaml is not a file; give none, default or the path"
    ):
        point(MEGATRON, "+job.values.overlap=missing.yaml")
    with pytest.raises(UserError, match=r"job\.command has \{a:megatron\} and \{b:megatron\}"):
        point("job.command=python t.py {a:megatron} {b:megatron}", "+job.values.a=none", "+job.values.b=none")
