"""What cannot be applied is left as the script has it, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.errors import Refused
from overlap_sweep.levers import Value, levers
from overlap_sweep.levers.status import APPLIED, SKIPPED, LeverStatus, add_status, inspected
from overlap_sweep.workloads.job.run import Watched
from tests.levers.runs import run
from tests.workloads.job.commands import job_point

BARE = """
import gc

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Data(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(12, 4))


gc.disable()
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for batch in DataLoader(Data(), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""A training in one process, whose two layers repeat nothing."""

OWN = """
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
first, second = nn.Sequential(*blocks), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for block in blocks:
    fully_shard(block, reshard_after_forward=False)
    block.compile(backend="eager")
fully_shard(first)
blocks[0].set_modules_to_forward_prefetch([blocks[1]])
blocks[1].set_modules_to_backward_prefetch([blocks[0]])
first.set_separate_reduce_scatter_group(False)
second = DistributedDataParallel(second, bucket_cap_mb=3, static_graph=False, gradient_as_bucket_view=False)
second.register_comm_hook(None, allreduce_hook)
optimizers = [torch.optim.AdamW(model.parameters(), fused=False) for model in (first, second)]
for (batch,) in DataLoader(TensorDataset(torch.ones(16, 8)), batch_size=4, num_workers=2, prefetch_factor=3):
    for is_last in (False, True):
        first.set_requires_gradient_sync(is_last)
        first(batch).sum().backward()
    with second.no_sync():
        second(batch).sum().backward()
    second(batch).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
"""A training that sets itself what levers set."""

UNUSED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""

MICROBATCHES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

# As in an older PyTorch.
del FSDPModule.set_separate_reduce_scatter_group
dist.init_process_group("gloo")
first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(first[0])
fully_shard(first)
second = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
for microbatches in (2, 2, 2, 3, 2):
    second(torch.ones(2, 8)).sum().backward()
    for _ in range(microbatches):
        first(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""

ALL: dict[str, Value] = {name: one.values[0] for name, one in levers().items() if one.is_in_process}
NO_DDP = "this training has made no DistributedDataParallel"
NO_FSDP1 = "this training has made no FullyShardedDataParallel"
NO_UNITS = "this training has no units of FSDP2 (fully_shard) below its root"
NO_BLOCKS = "this training has no modules of one class repeated in a ModuleList, ModuleDict or Sequential"
NO_WORKERS = "no DataLoader has workers; give job.levers.loader.num_workers, too"
NOTHING_AGAIN = "a step of this training computes nothing again by torch.utils.checkpoint"
NO_GROUP = "this training has made no init_process_group or new_group or split_group"

BARE_SKIPPED = {
    **{name: NO_GROUP for name in ALL if name.startswith("group.")},
    **{name: NO_DDP for name in ALL if name.startswith("ddp.")},
    **{name: NO_UNITS for name in ALL if name.startswith("fsdp2.")},
    "fsdp2.reshard_after_forward": "this training has made no fully_shard",
    **{name: NO_FSDP1 for name in ALL if name.startswith("fsdp1.")},
    "loader.num_workers": "the dataset is an IterableDataset, which each worker would read from its start",
    "loader.prefetch_factor": NO_WORKERS,
    "loader.persistent_workers": NO_WORKERS,
    "loader.pin_memory": "pinned memory needs GPUs",
    "host.non_blocking": "copies to a GPU need one",
    "host.collect_every": "the script has disabled garbage collection itself",
    "host.compile_blocks": NO_BLOCKS,
    "activations.recompute": NOTHING_AGAIN,
    "optimizer.fused": "the script gives the optimizer foreach=True, which excludes fused=True",
}


def given(what: str) -> str:
    return f"the script gives {what}; add job.levers_override=true to replace it"


def called(what: str) -> str:
    return f"the script calls {what} itself; add job.levers_override=true to replace it"


def test_a_training_without_what_levers_change(tmp_path: Path) -> None:
    ran = run(tmp_path / "run", BARE, levers=ALL, ranks=1, skip_steps=3)

    assert ran.applied == set()
    assert ran.skipped == BARE_SKIPPED


def test_what_the_script_sets_itself(tmp_path: Path) -> None:
    values = {
        **ALL,
        "fsdp2.reshard_after_forward": True,
        "loader.num_workers": 1,
        "ddp.first_bucket_mb": 2,
    }
    # static_graph ends this training.
    script = OWN.replace("with second.no_sync():", "with second.no_sync() and contextlib.nullcontext():")
    left_out = ("group.", "fsdp1.", "loader.pin", "loader.persistent", "fsdp2.symmetric", "host.non", "ddp.compress")
    asked = {name: value for name, value in values.items() if not name.startswith(left_out)}
    ran = run(tmp_path / "run", script, levers=asked, ranks=1, skip_steps=3)

    assert ran.applied - {*ran.skipped} == {*asked} - {*ran.skipped}
    assert ran.skipped == {
        "ddp.bucket_cap_mb": given("DistributedDataParallel bucket_cap_mb=3"),
        "ddp.static_graph": "the script calls no_sync",
        "ddp.no_sync": called("no_sync"),
        "fsdp2.prefetch": called("set_modules_to_forward_prefetch"),
        "fsdp2.forward_prefetch": called("set_modules_to_forward_prefetch"),
        "fsdp2.backward_prefetch": called("set_modules_to_backward_prefetch"),
        "fsdp2.reshard_after_forward": given("fully_shard reshard_after_forward=False"),
        "fsdp2.separate_reduce_scatter_group": called("set_separate_reduce_scatter_group"),
        "fsdp2.no_sync": called("set_requires_gradient_sync"),
        "loader.num_workers": given("DataLoader num_workers=2"),
        "loader.prefetch_factor": given("DataLoader prefetch_factor=3"),
        "host.compile_blocks": called("compile"),
        "activations.recompute": NOTHING_AGAIN,
        "optimizer.fused": given("AdamW fused=False"),
    }


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("script", "ranks"), [(BARE, 1), (OWN, 1), (MICROBATCHES, 2)], ids=["bare", "own", "microbatches"]
)
def test_an_inspection_says_the_same_without_a_lever(script: str, ranks: int, tmp_path: Path) -> None:
    """And the training ends as it does without."""
    ran = run(tmp_path / "run", script, ranks=ranks, skip_steps=3, steps=50, inspect=True)
    found = inspected([tmp_path / "run"])

    assert (ran.applied, ran.skipped) == (set(), {})
    reasons = {name: why.removeprefix("does not apply: ") for name in ALL if (why := found.get((name, ALL[name]), ""))}
    expected = {
        BARE: BARE_SKIPPED,
        OWN: {
            "ddp.no_sync": called("no_sync"),
            "fsdp2.prefetch": called("set_modules_to_forward_prefetch"),
            "ddp.bucket_cap_mb": given("DistributedDataParallel bucket_cap_mb=3"),
            "host.compile_blocks": called("compile"),
            "ddp.find_unused_parameters": "is there already",
        },
        MICROBATCHES: {"ddp.no_sync": "a step of this training has one microbatch"},
    }[script]
    lacking = {name for name in ALL if not levers()[name].applies and not levers()[name].constructor}
    assert reasons.items() >= {name: why for name, why in expected.items() if name not in lacking}.items()
    if script == MICROBATCHES:
        assert found["fsdp2.no_sync", True] == ""
        assert found["fsdp2.reshard_after_forward", 8].endswith(
            "8 is no factor of the 2 ranks that share a unit's parameters"
        )


def test_what_the_script_sets_itself_is_replaced_if_asked(tmp_path: Path) -> None:
    asked: dict[str, Value] = {
        "ddp.bucket_cap_mb": 1,
        "ddp.static_graph": True,
        "ddp.find_unused_parameters": False,
        "fsdp2.forward_prefetch": 2,
        "fsdp2.backward_prefetch": 2,
        "fsdp2.reshard_after_forward": True,
        "loader.num_workers": 1,
        "loader.prefetch_factor": 2,
        "optimizer.fused": True,
    }
    seen = "print(second.bucket_bytes_cap, second.static_graph, optimizer.param_groups[0]['fused'])\ndist.destroy"
    script = OWN.replace("with second.no_sync():", "if True:").replace("dist.destroy", seen)
    ran = run(tmp_path / "run", script, levers=asked, ranks=1, skip_steps=3, levers_override=True)

    assert (ran.applied, ran.skipped) == ({*asked}, {})
    assert ran.output.splitlines()[0] == f"{2**20} True True"


def test_parameters_without_gradients_need_to_be_found(tmp_path: Path) -> None:
    ran = run(tmp_path / "run", UNUSED, levers={"ddp.find_unused_parameters": False}, ranks=1)

    assert ran.skipped == {"ddp.find_unused_parameters": "the parameter spare.weight got no gradient in the first step"}


def test_microbatches_that_levers_would_synchronise_wrongly(tmp_path: Path) -> None:
    asked: dict[str, Value] = dict.fromkeys(
        ("ddp.no_sync", "fsdp2.no_sync", "fsdp2.separate_reduce_scatter_group"), True
    )
    ran = run(tmp_path / "run", MICROBATCHES, levers=asked, ranks=1, steps=50)

    separate = ran.skipped.pop("fsdp2.separate_reduce_scatter_group")
    assert separate.startswith("set_separate_reduce_scatter_group needs PyTorch 2.13; this is ")
    assert ran.skipped == {
        "ddp.no_sync": "a step of this training has one microbatch",
        "fsdp2.no_sync": "the number of microbatches changes: a step had 2, another 3",
    }


def test_what_a_process_says_after_the_last_look_counts(tmp_path: Path) -> None:
    point = job_point("python t.py", levers={"ddp": {"no_sync": True}})
    for status, reason in ((APPLIED, ""), (SKIPPED, "the number of microbatches changes")):
        add_status(str(tmp_path), LeverStatus("ddp.no_sync", True, status, reason))

    with pytest.raises(Refused, match="cannot be applied: the number of microbatches changes"):
        Watched(point, tmp_path, {}, "").check_levers()


SETS_A_VARIABLE = """
import os
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    model(torch.ones(4)).sum().backward()
    print(step, os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
    optimizer.step()
"""


@pytest.mark.end_to_end
def test_variables_that_the_command_sets_itself(tmp_path: Path) -> None:
    asked: dict[str, Value] = {"cuda.max_connections": 8}

    ran = run(tmp_path / "kept", SETS_A_VARIABLE, levers=asked, ranks=1)
    assert (
        "sets CUDA_DEVICE_MAX_CONNECTIONS=1 itself; add job.levers_override=true" in ran.skipped["cuda.max_connections"]
    )
    assert "15 1" in ran.output

    ran = run(tmp_path / "replaced", SETS_A_VARIABLE, levers=asked, ranks=1, levers_override=True)
    assert not ran.skipped
    assert "15 8" in ran.output

    late = SETS_A_VARIABLE.replace("model = ", "os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] = '1'\nmodel = ")
    ran = run(tmp_path / "late", late, levers=asked, ranks=1, levers_override=True)
    assert ran.skipped["cuda.max_connections"] == "the command sets CUDA_DEVICE_MAX_CONNECTIONS=1 itself"

    run(tmp_path / "inspected", SETS_A_VARIABLE, ranks=1, inspect=True)
    seen = inspected([tmp_path / "inspected"])
    values = (seen["cuda.max_connections", value] for value in levers()["cuda.max_connections"].values)
    assert [*values] == ["is there already", "", ""]
