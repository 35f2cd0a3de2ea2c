"""Points are composed as Hydra does, only faster; and what Hydra refuses is said in one line."""

from pathlib import Path

import pytest
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.composition import as_was_typed, compose_point
from overlap_sweep.hydra_adapter.overrides import as_choice
from tests.composed import multirun
from tests.golden.command_lines import answers
from tests.sweeps import launch_here

Sweep = tuple[ConfigLoader, DictConfig]


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    """What a launcher is given of `launch.py -m runtime.device=cpu hydra.sweep.subdir=...`."""
    given = ["runtime.device=cpu", "hydra.sweep.subdir=${hydra.job.override_dirname}_${backend}_${num_sm}"]
    return multirun(*given)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("tp_size=4", "num_sm=37"),
        ("operator=fc2", "method=pipeline", "num_splits=2", "backend=torch", "model=llama3_8b", "model.head_dim=64"),
        ("num_sm=8", "method=ring_exchange", "aggregate=true", "workload.tokens=64", "precision=null"),
        ("workload=layer", "layer=linear", "layer.variants=[none,bulk]", "layer.num_replicas=2"),
        ("workload=fsdp", "distributed.env.NCCL_ALGO=Ring", "+distributed.env.NCCL_X=1", "++training.max_steps=5"),
        ("++num_sm=4", "num_sm=8"),
        ("num_sm=8", "++num_sm=4"),
        ("num_sm=3", "~phase"),
        ("+experiment=tp_training", "impl=autotp"),
        ("workload=layer", "layer=moe"),
        ("workload=layer", "layer=moe", "tp_size=2", "num_sm=32"),
        ("phases={fprop:{method:ring_exchange,num_sm:2}}", "repetition=3"),
        ("workload=tp_training", "+hydra.job.env_set.A=b", "tp_training.dtype=bfloat16"),
        ("workload=job", 'job.command="python t.py {b}"', "+job.values.b=2", "+job.env.A='x y'", "job.ranks=2"),
        ("workload=job", "job.command=x", "job.levers.ddp.bucket_cap_mb=4", "+job.levers.ddp.static_graph=true"),
        ("workload=job", "job.command=x", "job.levers={ddp.bucket_cap_mb:4}"),
        ("workload=fsdp", "+distributed.env.NCCL_ALGO=Ring"),
        ("workload=layer", "hydra.sweep.subdir='proof a=1'", "tp_size=2"),
        ("num_sm=3", "hydra.sweep.subdir=x", "hydra.sweep.subdir=y_${num_sm}"),
        ("num_sm=3", "hydra.job.name=x"),
    ],
)
def test_a_point_is_as_hydra_composes_it(sweep: Sweep, overrides: tuple[str, ...]) -> None:
    loader, config = sweep
    for _ in range(2):
        by_hydra = as_was_typed(loader.load_sweep_config(config, list(map(as_choice, overrides))))
        composed = compose_point(loader, config, overrides)
        assert composed == by_hydra
        assert composed.hydra.runtime.choices == by_hydra.hydra.runtime.choices
        assert OmegaConf.to_container(composed.hydra.overrides) == OmegaConf.to_container(by_hydra.hydra.overrides)
        if "num_sm" in composed:
            assert composed.hydra.sweep.subdir == by_hydra.hydra.sweep.subdir


def test_points_share_nothing(sweep: Sweep) -> None:
    loader, config = sweep
    changed, untouched = (compose_point(loader, config, ["num_sm=3"]) for _ in range(2))
    changed.model.hidden_size = 7
    changed.hydra.job.num = 5
    assert compose_point(loader, config, ["num_sm=3"]) == untouched != changed


@pytest.mark.parametrize(
    "typed",
    [
        *("num_smm=8", "workload.repeat=3", "fsdp.forward_prefetch=true", "workload=fsdp num_sm=3", "+job.values.x=1"),
        *("workload=layer operator=fc1", "workload=copy_engine model=llama3_8b", "distributed.env.NCCL_ALGO=Ring"),
        *("workload=fsdp distributed.env.NCCL_X=1", "operator=fc3", "model=nobody", "num_sm=1.5", "layer=3"),
    ],
)
def test_a_wrong_key_in_a_sweep_is_answered_as_in_a_single_point(sweep: Sweep, typed: str) -> None:
    with pytest.raises(UserError) as refused:
        compose_point(*sweep, typed.split())
    assert f"error: {refused.value}\nexit status 2\n" == answers()[typed]


@pytest.mark.parametrize(
    ("overrides", "sweeper"),
    [
        ((), "basic"),
        (("+experiment=four_operators",), "basic"),
        (("+experiment=tp_overlap_tuner",), "tuner"),
        (("+experiment=fsdp_overlap",), "knobs"),
        (("+experiment=tp_overlap_tuner", "hydra/sweeper=bisect"), "bisect"),
    ],
)
def test_an_experiment_brings_its_sweeper(sweep: Sweep, overrides: tuple[str, ...], sweeper: str) -> None:
    loader, _ = sweep
    config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
    assert config.hydra.runtime.choices["hydra/sweeper"] == sweeper


@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_what_a_slurm_job_is_given_names_no_class_of_a_plugin(sweep: Sweep, group: str) -> None:
    """Hydra executes the plugins' modules again there, after which their classes are others."""
    stored = ConfigStore.instance().repo["hydra"][group].values()
    ours = [one for one in stored if isinstance(one, ConfigNode) and one.provider == "overlap_sweep"]
    assert len(ours) >= 3
    for one in ours:
        schema = OmegaConf.get_type(one.node)
        assert schema is not None
        assert not schema.__module__.startswith("hydra_plugins.")


def test_names_show_what_varies_and_points_are_known_by_what_they_measure(tmp_path: Path) -> None:
    """Layers that nothing here can run are skipped, which is a result without a process."""
    given = ("-m", "workload=layer", "backend=transformer_engine,megatron", "runtime.device=cpu")
    where = f"hydra.sweep.dir={tmp_path}/../{tmp_path.name}"

    def names() -> list[str]:
        return sorted(path.parent.name for path in tmp_path.glob("*/result.json"))

    done = launch_here(*given, "profile=none", where)
    assert "missing" not in done.stdout
    first = names()
    launch_here(*given, "profile=none", where)
    assert names() == first
    backends, start = ("megatron", "transformer_engine"), "qwen3_0_6b_tp2_transformer_layer_backend="
    assert [name[:-6] for name in first] == [f"{start}{backend}_" for backend in backends]
    done = launch_here(*given, "profile=none,best", where)
    assert "already measured: 2 of 4 points" in done.stdout
    added = sorted({*names()} - {*first})
    assert [name[:-6] for name in added] == [f"{start}{backend}_profile=best_" for backend in backends]
    assert [len({name[-6:] for name in some}) for some in (first, added)] == [1, 1]
    done = launch_here(*given, "profile=none,best", where)
    assert "already measured: 4 of 4 points" in done.stdout
    assert len(names()) == 4


def test_another_launcher_ends_with_what_became_of_the_points(tmp_path: Path) -> None:
    """Its points run in processes of which this one hears nothing."""
    given = (
        "workload=layer",
        "backend=transformer_engine,megatron",
        "runtime.device=cpu",
        f"hydra.sweep.dir={tmp_path}",
    )
    done = launch_here("-m", *given, "hydra/launcher=submitit_local")
    assert done.returncode == 1
    assert done.stdout.count("skipped qwen3_0_6b_tp2_transformer_layer_backend=") == 2
    assert done.stderr.splitlines()[-1].startswith("error: Every point was skipped: ")
