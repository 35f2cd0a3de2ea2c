"""What launch.py shows without measuring, and what it refuses before anything is started."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from overlap_sweep import workloads
from overlap_sweep.config import ModelConfig
from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.overrides import as_choice
from overlap_sweep.runtime import group_config, point
from overlap_sweep.runtime.resolvers import register
from tests.sweeps import ROOT, SMALL, Launch, launch_here


def test_cfg_job_shows_the_composed_configuration() -> None:
    shown = yaml.safe_load(launch_here("--cfg", "job", "tp_size=8", "num_sm=37", "method=pipeline").stdout)
    assert (shown["tp_size"], shown["num_sm"], shown["method"], shown["num_splits"]) == (8, 37, "pipeline", 4)
    assert shown["model"]["hidden_size"] == 1024


def test_configurations_share_nothing_although_hydra_does_not_copy_what_is_registered() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        changed, untouched = compose("config"), compose("config")
        changed.model.hidden_size, changed.workload.tokens = 7, 8
        assert compose("config") == untouched
    assert copy.deepcopy(ConfigStore.instance()) is ConfigStore.instance()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("tp_size=9",), "tp_size=9 is out of range; give a value from 1 to 8"),
        (("+num_smm=8",), "Unknown option num_smm. Did you mean num_sm?"),
        (("+workload.repeat=8",), "Unknown option workload.repeat. Did you mean workload.repeats?"),
        (("workload=tp_training", "+tp_training.overlapping=true"), "Unknown option tp_training.overlapping"),
        (("num_sm=0",), "num_sm=0 is out of range"),
        (("operator=fc3",), "fc3"),
        (("phase=sideways",), "choose one of all, fprop, dgrad, wgrad"),
        (("backend=magic",), "magic"),
        (("workload.name=play",), "workload=play is not known; choose one of operator"),
        (("workload.repeats=1",), "workload.repeats=1 is out of range"),
        (("profile=some",), "choose one of all, best, none"),
        (("precision=fp4",), "choose one of fp32, fp16, bf16, fp8_delayed, fp8_current, fp8_block, mxfp8, nvfp4"),
        (("workload=layer", "layer.variants=[none,magic]"), "layer.variants: magic is not known"),
        (("workload=layer", "layer.tp_comm_overlap_cfg=/nowhere.yaml"), "/nowhere.yaml cannot be read"),
        (("workload=layer", "layer.num_replicas=0"), "layer.num_replicas=0 is out of range"),
        (("model=hf",), "model.name"),
        (("model=hf", "model.name=nobody/nothing"), "give a local folder, a config.json"),
        (("model.hidden_size=null",), "model qwen3_0_6b has no hidden_size"),
        (
            ("workload=fsdp", "model=qwen3_tiny", "model.num_layers=1"),
            "set ranking.num_layers; it uses model.{",
        ),
        (("workload=operator", "model.rope_theta=5"), "workload=operator does not use model.rope_theta=5.0;"),
        (("workload=layer", "model.vocab_size=null"), "workload=layer does not use model.vocab_size=None;"),
        (("workload=kernel", "model.bias=true"), "model.bias=True; it uses model.{name,source,hidden"),
        (
            ("workload=kernel", "n=64", "k=64", "model.head_dim=8"),
            "workload=kernel with n and k does not use model.head_dim=8;",
        ),
        (("workload=tp_training", "model.gated_mlp=false"), "workload=tp_training does not use model.gated_mlp=False;"),
        (("tp_size=2", "runtime.device=auto"), "tp_size=2 needs 2 GPUs, but 1 are visible"),
        (
            *(("tp_size=2", "workload=layer", "layer.num_replicas=2", "runtime.device=cuda"),),
            "tp_size=2 with layer.num_replicas=2 needs 4 GPUs, but 1 are visible",
        ),
    ],
)
def test_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], says: str) -> None:
    monkeypatch.setattr(point, "visible_gpus", lambda: 1)
    GlobalHydra.instance().clear()
    register()
    with (
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
        pytest.raises((UserError, HydraException)) as refused,
    ):
        point.resolve(compose("config", ["runtime.device=cpu", *map(as_choice, overrides)]))
    assert says in f"{refused.value} {refused.value.__cause__}"


PRESETS = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml") if path.stem != "hf")


WITH_MODEL = [name for name in workloads.names() if issubclass(workloads.schema(name), ModelConfig)]


@pytest.mark.parametrize("workload", WITH_MODEL)
def test_what_a_preset_says_is_refused_by_no_workload(workload: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for name in PRESETS:
            if workload != "tp_training" or "architecture" in (ROOT / f"conf/model/{name}.yaml").read_text():
                # The only operator that all of them have.
                operator = ["operator=proj"] if workload == "kernel" else []
                config = compose("config", [f"workload={workload}", f"model={name}", "runtime.device=cpu", *operator])
                assert point.resolve(config)["workload"]["name"] == workload


def test_a_key_of_model_that_a_file_of_ones_own_gives_in_vain_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel:\n  num_layers: 1\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text((ROOT / "conf/model/qwen3_tiny.yaml").read_text())
    search = f"hydra.searchpath=[file://{tmp_path}]"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        point.resolve(compose("config", [search, "model=own", "runtime.device=cpu"]))
        config = compose("config", [search, "model=own", "+experiment=mine", "runtime.device=cpu"])
        with pytest.raises(UserError, match=r"does not use model\.num_layers=1;"):
            point.resolve(config)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model=nobody",), "nobody"),
        (("num_sm=0",), "error: num_sm=0 is out of range"),
        (("-m", "num_sm=1,0"), "error: num_sm=0 is out of range"),
        (("-m", "num_sm=2,4", "hydra.sweep.subdir=here"), "Jobs 0 and 1 of the sweep differ"),
        (("-m", "num_sm=interval(1,3)"), "list the values"),
        (("num_sm",), "num_sm has no value; give num_sm=... ."),
        (("phases={dgrad:bulk}",), "phases.dgrad.method must be one of"),
        (("workload=kernel", "m=0"), "error: m=0 is out of range"),
        (("-m", "workload=fsdp", "hydra/sweeper=bisect", "fsdp.forward_prefetch=0,1"), "use hydra/sweeper=knobs"),
        (("-m", "workload=layer", "hydra/sweeper=bisect", "tp_size=1,2"), "sweep that without a search"),
    ],
)
def test_wrong_input_is_one_clear_error_and_nothing_is_started(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    where = (f"hydra.sweep.dir={tmp_path}/sweep", f"hydra.run.dir={tmp_path}/sweep/single")
    small = ("runtime.device=cpu",) if any("workload" in argument for argument in arguments) else SMALL
    done = launch_here(*arguments, *small, *where)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "refused",
    [
        ("num_sm=0",),
        ("numsm=3",),
        ("model=hf", "model.name=nowhere/config.json"),
        ("runtime.device=cuda", "tp_size=8"),
        ("reuse=true",),
        ("resume=multirun/nowhere",),
        ("-m", "num_sm=2,0"),
        ("-m", "num_sm=2,0", "hydra/launcher=basic"),
        ("-m", "num_sm=2,0", "hydra/launcher=submitit_local"),
        ("-m", "num_sm=2,0", "hydra/sweeper=bisect"),
        ("-m", "num_sm=2,4", "hydra.sweep.subdir=here"),
        ("-m", "resume=last"),
        ("-m", "+experiment=tp_overlap_tuner", "tuner.presets=[nowhere.yaml]"),
        ("hydra.run.dir=/proc/nowhere",),
        ("-m", "resume=/dev/null"),
        ("-m", "num_sm=2,4", "hydra.sweep.dir=/proc/nowhere"),
    ],
)
def test_a_refused_start_leaves_nothing(tmp_path: Path, refused: tuple[str, ...]) -> None:
    done = launch_here(*refused, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode in (1, 2)
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert error.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_a_refused_start_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "earlier" / ".hydra").mkdir(parents=True)
    done = launch_here("-m", "num_sm=2,0", "hydra/launcher=basic", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["earlier", ".hydra"]


def test_layers_that_cannot_run_on_a_cpu_are_skipped_with_the_reason(tmp_path: Path) -> None:
    backends = "backend=transformer_engine,megatron,torch"
    given = ("workload=layer", backends, "layer.variants=[none,default]", "runtime.device=cpu")
    done = launch_here("-m", *given, f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=${backend}")
    results = Launch(tmp_path).results()
    for name, says in {
        "transformer_engine": "transformer_engine",
        "megatron": "backend=megatron has no whole layers",
        "torch": "default: backend=torch has no default overlap of its own",
    }.items():
        assert results[name].status == "skipped"
        assert says in str(results[name].error)
        assert says in done.stderr
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("workers.log"))


def test_a_python_without_torch_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    group_config.check_torch()
    monkeypatch.setattr(group_config, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"PyTorch is not installed for .*; pip install 'overlap-sweep\[torch\]'"):
        group_config.check_torch()
