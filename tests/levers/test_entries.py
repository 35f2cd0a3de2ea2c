"""The entries of levers.yaml, and what is made of values before anything is started."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from overlap_sweep.effects.settings import known, known_settings
from overlap_sweep.errors import UserError
from overlap_sweep.levers import Lever, chosen, environment, groups, levers
from overlap_sweep.levers.process import NotApplicable, NotHere
from tests.workloads.job.commands import COMMAND, point, refusal

CAUSES = {path.stem for path in Path(import_module("overlap_sweep.diagnosis.causes").__path__[0]).glob("*.py")}
IN_PROCESS = {name: one for name, one in levers().items() if one.is_in_process}


@pytest.mark.parametrize("name", levers())
def test_an_entry_is_true(name: str) -> None:
    lever = levers()[name]
    assert {*lever.causes} <= CAUSES - {"unexplained"}
    assert chosen({name.partition(".")[0]: {name.partition(".")[2]: value} for value in lever.values})
    assert lever.values == [value for value in lever.values if value in (lever.choices or lever.values)]
    assert "{value}" in lever.write or len(lever.choices) == 1 or lever.also or lever.way == "argument"
    if lever.effect:
        assert known(f"job.levers.{name}") is known_settings()[lever.effect]
    else:
        # What is compared would have an entry: without one the verdict is that it cannot be seen.
        assert "A trace shows it only" in lever.note or "which are not compared" in lever.note


@pytest.mark.parametrize("lever", IN_PROCESS.values(), ids=IN_PROCESS)
def test_what_it_names_is_there(lever: Lever) -> None:
    for function in filter(None, (lever.call, lever.applies, lever.constructor and lever.constructor.make)):
        module, _, name = function.partition(":")
        assert callable(getattr(import_module(module), name))
    for target in lever.constructor.of if lever.constructor else []:
        module, _, name = target.partition(":")
        assert lever.constructor
        assert lever.constructor.argument in inspect.signature(getattr(import_module(module), name)).parameters
    for target in lever.unless:
        module, _, method = target.partition(":")
        owner, _, attribute = method.partition(".")
        assert hasattr(getattr(import_module(module), owner), attribute)


def test_variables() -> None:
    values = {"nccl.max_ctas": 8, "torch.avoid_record_streams": True, "allocator.expandable_segments": True}
    assert environment({**values, "allocator.max_split_size_mb": 128, "ddp.bucket_cap_mb": 4}) == {
        "NCCL_MAX_CTAS": "8",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
    }
    written = {name: levers()[name].written(value) for name, value in values.items()}
    assert written == {
        "nccl.max_ctas": "export NCCL_MAX_CTAS=8",
        "torch.avoid_record_streams": "export TORCH_NCCL_AVOID_RECORD_STREAMS=1",
        "allocator.expandable_segments": "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    }
    assert "options.config.max_ctas = 8\n" in levers()["group.max_ctas"].written("dp:8")
    assert "is_high_priority_stream=True)" in levers()["group.high_priority"].written("dp:true")


def test_an_entry_says_only_what_is_not_as_usual() -> None:
    switch = msgspec.convert({"what": "x", "results": "exact", "environment": "X"}, Lever)
    assert (switch.values, switch.default, switch.write) == ([True], False, "export X={value}")
    known = levers()
    assert known["megatron.num_workers"].program == "megatron"


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (
            ["+job.levers.nccl.max_ctas=8", "+job.env.NCCL_MAX_CTAS=4"],
            "job.levers.nccl.max_ctas and job.env.NCCL_MAX_CTAS set the same; give one of them.",
        ),
        (
            ["+job.levers.cuda.max_connections=1", "runtime.max_connections=8"],
            "job.levers.cuda.max_connections and runtime.max_connections set the same; give one of them.",
        ),
        (
            ["+job.levers.group.max_ctas=dp:many"],
            "job.levers.group.max_ctas=dp:many cannot be understood; give such as 2 or 4 or 8 or 16 or dp:8 or 0-3:8.",
        ),
        (
            ["+job.levers.nccl.algo=NVLS"],
            "job.levers.nccl.algo=NVLS is not one of Ring, Tree, allreduce:Ring, allreduce:Tree.",
        ),
        (
            ["+job.levers.fsdp2.symmetric_memory=copy_engines", "+job.levers.nccl.cta_policy=1"],
            "job.levers.fsdp2.symmetric_memory=copy_engines sets job.levers.nccl.cta_policy=2; leave that out.",
        ),
        (["+job.levers.nccl.cta_policy=true"], "job.levers.nccl.cta_policy=true is not one of 0, 1, 2."),
        (["+job.levers.nccl.max_ctas=true"], "job.levers.nccl.max_ctas=true is not an integer, such as 1."),
        (
            ["+job.levers.host.collect_every=0"],
            "job.levers.host.collect_every=0 cannot be understood; give such as 50 or 200.",
        ),
        (
            ["+job.levers.fsdp2.prefetch=-1"],
            "job.levers.fsdp2.prefetch=-1 cannot be understood; give such as 1 or 2 or 3.",
        ),
        (["+job.levers.ddp.bucket_mb=4"], "job.levers.ddp.bucket_mb is not known. Did you mean ddp.bucket_cap_mb?"),
    ],
)
def test_wrong_values(typed: list[str], wrong: str) -> None:
    with pytest.raises(UserError) as error:
        point(COMMAND, *typed)
    assert str(error.value) == wrong


def test_a_variable_that_is_left_as_it_is_sets_nothing() -> None:
    assert point(COMMAND, "+job.levers.nccl.max_ctas=8", "+job.env.NCCL_MAX_CTAS=null").job.levers


def test_on_a_cpu() -> None:
    assert refusal(COMMAND, "+job.levers.nccl.max_ctas=8") == "job.levers.nccl.max_ctas has a meaning on GPUs only"


def test_levers_that_exclude_each_other_are_refused_before_anything_runs() -> None:
    both = "+job.levers.ddp.no_sync=true", "+job.levers.ddp.static_graph=true"
    said = "job.levers.ddp.no_sync does not go with job.levers.ddp.static_graph=true"
    assert refusal(COMMAND, *both) == said
    assert refusal(COMMAND, both[0], "+job.levers.ddp.static_graph=false") is None


class Options:
    """As ProcessGroupNCCL.Options, which a PyTorch for CPUs has not."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=-(2**31), min_ctas=-(2**31))


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def new_group(ranks: list[int], description: str | None = None, **given: Any) -> dict[str, Any]:
    return {"ranks": ranks, "group_desc": description, "backend": None, "pg_options": None, **given}


@pytest.mark.usefixtures("nccl")
def test_options_of_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    first: Any = groups.max_ctas("0-3:8", {"backend": "cpu:gloo,cuda:nccl", "pg_options": None, "world_size": -1})
    assert (first.config.max_ctas, first.is_high_priority_stream) == (8, False)

    # Another lever of the same group adds to it, and the script's own options may be for other groups, too.
    second: Any = groups.high_priority("dp:true", new_group([0, 2], "mesh_dp", pg_options=first))
    assert (second.config.max_ctas, second.is_high_priority_stream) == (8, True)
    assert not first.is_high_priority_stream
    third: Any = groups.min_ctas("0-2/2:16", new_group([0, 2]))
    # NCCL refuses it alone.
    assert (third.config.min_ctas, third.config.max_ctas) == (16, 32)

    # Where the script leaves the backend to PyTorch, get_backend() says "undefined".
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda parent: "cpu:gloo" if parent else "cpu:gloo,cuda:nccl")
    fourth: Any = groups.max_ctas(4, new_group([0, 2]))
    assert fourth.config.max_ctas == 4
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(NotHere, match="no process group of NCCL"):
        groups.max_ctas(4, {"parent_pg": "a group of gloo", "split_ranks": [[0], [1]], "pg_options": None})

    with pytest.raises(NotApplicable, match="the script gives max_ctas=8 in pg_options"):
        groups.max_ctas(4, new_group([0], pg_options=first))
    with pytest.raises(NotHere, match="description or ranks tp; the last one was mesh_dp of ranks 0, 2"):
        groups.max_ctas("tp:4", new_group([0, 2], "mesh_dp"))
    with pytest.raises(NotHere, match="no process group of NCCL"):
        groups.max_ctas(4, new_group([0, 2], backend="gloo"))

    each = [groups.max_ctas("dp:8+tp:4", new_group([0, 2], name)) for name in ("mesh_dp", "mesh_tp")]
    assert [one.config.max_ctas for one in each if isinstance(one, Options)] == [8, 4]
    with pytest.raises(NotApplicable, match="Options have no cga_cluster_size"):
        groups.cga_cluster_size(2, new_group([0, 2]))


def test_lines_for_several_process_groups() -> None:
    lines = levers()["group.high_priority"].written("dp:true+tp:false").splitlines()
    assert lines[0] == "# process groups dp"
    assert lines[1].endswith("Options(is_high_priority_stream=True)")
    assert lines[3] == "# process groups tp"
