"""Written settings, read by Megatron-Core and PyTorch themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.nccl.settings import MEGATRON_GROUPS, GroupSetting
from tests.nccl.settings import DP, TP, one

GROUPS_OF_EVERY_KIND = [
    {"create_all_gather_group": True, "context_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    {"hybrid_context_parallel": True},
    {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
]
"""Arguments with which Megatron-Core makes, in one call or another, each group that has options."""


class Options:
    """Stands for ProcessGroupNCCL.Options where PyTorch has no NCCL."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


@pytest.fixture(scope="module")
def parallel_state() -> Any:
    """Imported by who needs it: it takes two seconds."""
    return pytest.importorskip("megatron.core.parallel_state", reason="needs Megatron-Core")


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


@pytest.fixture
def made(parallel_state: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Description and options of the groups that Megatron-Core makes, as one of 16 ranks."""
    found: list[tuple[str, Any]] = []
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 16}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(
        parallel_state,
        "create_group",
        lambda *_, group_desc=None, pg_options=None, **__: found.append((group_desc, pg_options)),
    )
    yield found
    parallel_state.destroy_model_parallel()


def initialize(parallel_state: Any, **arguments: Any) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **arguments)


def test_descriptions_have_the_names_of_megatron_core(
    parallel_state: Any, made: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_nccl_options", lambda name, _: name)
    for arguments in GROUPS_OF_EVERY_KIND:
        initialize(parallel_state, **arguments)
    named = {(description, name) for description, name in made if name}

    assert {(description, GroupSetting(description=description).megatron_name) for description, _ in named} == named
    assert {
        pattern for pattern in MEGATRON_GROUPS if not any(fnmatchcase(description, pattern) for description, _ in named)
    } == set()


def test_no_name_of_megatron_core_is_missing(parallel_state: Any) -> None:
    names = re.findall(r'get_nccl_options\(\s*"(\w+)"', inspect.getsource(parallel_state))
    assert {*names} == {*MEGATRON_GROUPS.values()}


@pytest.mark.usefixtures("without_nccl")
def test_megatron_core_gives_groups_what_the_yaml_says(
    parallel_state: Any, made: list[tuple[str, Any]], tmp_path: Path
) -> None:
    found = one("megatron", TP, DP)
    (tmp_path / found.file).write_text(found.text)
    path = str(tmp_path / found.file)
    initialize(parallel_state, tensor_model_parallel_size=2, nccl_communicator_config_path=path)

    options = {description: given for description, given in made if given is not None}
    tp, dp = options.pop("TENSOR_MODEL_PARALLEL_GROUP"), options.pop("DATA_PARALLEL_GROUP_WITH_CP")
    assert options == {}
    assert (vars(tp.config), tp.is_high_priority_stream) == ({"max_ctas": 8, "min_ctas": 4}, False)
    assert (vars(dp.config), dp.is_high_priority_stream) == ({"cga_cluster_size": 2, "max_ctas": 2}, True)


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "pg_options.py", "exec"), names)
    options: dict[str, Any] = names["pg_options"]
    return options


@pytest.mark.usefixtures("without_nccl")
def test_pytorch_lines_run() -> None:
    first = GroupSetting(description="default_pg", cta_policy=1)
    found = one("pytorch", TP, GroupSetting(description="mesh_dp", high_priority=True), first)
    options = run(found.text)
    assert vars(options["TENSOR_MODEL_PARALLEL_GROUP"].config) == {"max_ctas": 8, "min_ctas": 4}
    assert options["mesh_dp"].is_high_priority_stream
    assert vars(options["default_pg"].config) == {"cta_policy": 1}
    calls = [line for line in found.text.splitlines() if line.startswith("# ")]
    assert [call.partition("(")[0] for call in calls] == [
        "# dist.new_group",
        "# init_device_mesh",
        "# dist.init_process_group",
    ]


@pytest.mark.gpu
def test_nccl_groups_have_the_options(tmp_path: Path) -> None:
    asked = GroupSetting(description="dp", max_ctas=2, min_ctas=1, cga_cluster_size=2, cta_policy=1, high_priority=True)
    (options,) = run(one("pytorch", asked).text).values()
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = dist.new_group([0], pg_options=options, group_desc="dp")
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        given = group._get_backend(torch.device("cuda")).options
        assert given.is_high_priority_stream
        assert {name: getattr(given.config, name) for name in asked.knobs if name != "high_priority"} == {
            "cga_cluster_size": 2,
            "max_ctas": 2,
            "min_ctas": 1,
            "cta_policy": 1,
        }
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_megatron_core_makes_options_of_nccl(parallel_state: Any, tmp_path: Path) -> None:
    import yaml

    (tmp_path / "config.yaml").write_text(one("megatron", DP).text)
    options = parallel_state.get_nccl_options("dp_cp", yaml.safe_load((tmp_path / "config.yaml").read_text()))
    assert (options.config.max_ctas, options.config.cga_cluster_size, options.is_high_priority_stream) == (2, 2, True)
