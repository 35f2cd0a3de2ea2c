"""How constructors are wrapped, in this process."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from overlap_sweep.levers import Value, levers
from overlap_sweep.levers.ddp import counted, synchronise_last
from overlap_sweep.levers.fsdp import reshard_after_forward
from overlap_sweep.levers.process import Inspection, Levers, NotApplicable, live
from overlap_sweep.levers.status import LeverStatus, inspected, statuses


def installed(directory: Path, **values: Value) -> Levers:
    made = Levers({name.replace("__", "."): value for name, value in values.items()}, str(directory), override=False)
    made.install()
    return made


def said(directory: Path) -> list[tuple[str, str, str]]:
    def brief(one: LeverStatus) -> tuple[str, str, str]:
        return one.lever, one.status, one.reason

    return [brief(one) for of_process in statuses(directory) for one in of_process]


def test_an_argument_that_an_older_version_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedDataParallel:
        def __init__(self, module: nn.Module, bucket_cap_mb: int | None = None) -> None:
            self.bucket_cap_mb = bucket_cap_mb

    older = ModuleType("torch.nn.parallel.distributed")
    older.DistributedDataParallel = DistributedDataParallel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, older.__name__, older)

    installed(tmp_path, ddp__first_bucket_mb=1, ddp__bucket_cap_mb=4)

    assert DistributedDataParallel(nn.Linear(1, 1)).bucket_cap_mb == 4
    assert said(tmp_path) == [
        (
            "ddp.first_bucket_mb",
            "skipped",
            "DistributedDataParallel has no argument bucket_cap_mb_list in this version; it needs PyTorch 2.13",
        ),
        ("ddp.bucket_cap_mb", "applied", ""),
    ]


def test_functions_that_an_older_version_lacks_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("torch.distributed.distributed_c10d")
    older.init_process_group = older.new_group = lambda backend=None, pg_options=None: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, older.__name__, older)

    levers = installed(tmp_path, group__max_ctas="8")

    assert said(tmp_path) == []
    levers.say_unmet()
    (only,) = said(tmp_path)
    assert only == ("group.max_ctas", "skipped", "torch.distributed.distributed_c10d has no split_group")


def test_modules_are_found_as_python_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a package that is installed as editable."""
    module = "torch.nn.parallel.distributed"
    file = tmp_path / "somewhere.py"
    file.write_text(
        "class DistributedDataParallel:\n    def __init__(self, bucket_cap_mb=None):\n        self.mb = bucket_cap_mb\n"
    )

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, file) if name == module else None

    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    installed(tmp_path, ddp__bucket_cap_mb=4)

    assert importlib.import_module(module).DistributedDataParallel().mb == 4


def test_what_a_rank_made_before_it_was_forked_is_applied_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    levers = installed(tmp_path, loader__num_workers=1)
    DataLoader(TensorDataset(torch.ones(2)))
    if not (child := os.fork()):
        try:
            levers.at_end_of_step(1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert said(tmp_path) == [("loader.num_workers", "applied", "")] * 2


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no longer wrapped after the test."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        monkeypatch.setattr(kind, "__init__", kind.__init__)


@pytest.mark.usefixtures("optimizers")
def test_parameters_may_come_from_an_iterator(tmp_path: Path) -> None:
    installed(tmp_path, optimizer__fused=True)
    own = nn.Linear(2, 2)

    for params in (
        own.parameters(),
        filter(lambda one: one.requires_grad, own.parameters()),
        [{"params": own.parameters()}],
    ):
        made = torch.optim.AdamW(params)
        assert [[*group["params"]] for group in made.param_groups] == [[*own.parameters()]]
        assert made.param_groups[0]["fused"]
    made = torch.optim.AdamW(own.named_parameters())
    assert (made.param_groups[0]["fused"], len(made.param_groups[0]["params"])) == (True, 2)


@pytest.mark.usefixtures("optimizers")
@pytest.mark.parametrize(("dtype", "device"), [("complex64", "cpu"), ("float32", "meta")])
def test_fused_kernels_that_torch_has_not(dtype: str, device: str, tmp_path: Path) -> None:
    installed(tmp_path, optimizer__fused=True)

    made = torch.optim.Adagrad([nn.Parameter(torch.ones(2, dtype=getattr(torch, dtype), device=device))])

    assert made.param_groups[0]["fused"] is None
    assert said(tmp_path) == [
        ("optimizer.fused", "skipped", f"fused=True takes no parameters of torch.{dtype} on {device}")
    ]


def test_what_does_not_take_an_argument_is_made_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    installed(tmp_path, loader__num_workers=-1)

    assert DataLoader(TensorDataset(torch.ones(2))).num_workers == 0
    (only,) = said(tmp_path)
    assert only[:2] == ("loader.num_workers", "skipped")
    assert only[2].startswith("DataLoader does not take it here (num_workers option should be non-negative")


def test_what_a_function_has_refused_is_not_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed its arguments by half."""
    module, calls = ModuleType("torch.distributed.distributed_c10d"), []

    def new_group(pg_options: object = None) -> None:
        calls.append(pg_options)
        raise ValueError("not these")

    module.new_group = module.init_process_group = module.split_group = new_group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("overlap_sweep.levers.groups.max_ctas", lambda value, arguments: value)
    installed(tmp_path, group__max_ctas=8)

    with pytest.raises(ValueError, match="not these"):
        module.new_group()
    assert calls == [8]
    assert said(tmp_path) == [("group.max_ctas", "skipped", "new_group does not take it here (not these)")]


@pytest.mark.parametrize(("world_size", "value"), [("8", True), ("16", 8), ("2", None), ("12", None)])
def test_parameters_are_kept_on_a_part_of_the_ranks(
    world_size: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    given = {"module": nn.Linear(1, 1), "mesh": None}
    if value is None:
        with pytest.raises(NotApplicable, match=f"8 is no factor of the {world_size} ranks"):
            reshard_after_forward(8, given)
    else:
        assert reshard_after_forward(8, given) is value or reshard_after_forward(8, given) == value == 8


def test_a_training_goes_on_whatever_an_inspection_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"host.collect_every": msgspec.structs.replace(levers()["host.collect_every"], applies="json:loads")}
    monkeypatch.setattr("overlap_sweep.levers.process.levers", lambda: known)

    Inspection(str(tmp_path), override=True).at_end_of_step(1)

    assert inspected([tmp_path])["host.collect_every", 50].startswith("does not apply: the JSON object must be")


def test_compiled_models_are_not_counted() -> None:
    model = nn.Linear(1, 1)
    assert next(counted([model])) is False
    assert model._forward_pre_hooks
    other = nn.Linear(1, 1)
    other.compile(backend="eager")
    assert next(counted([other])) is False
    assert not other._forward_pre_hooks


@pytest.mark.usefixtures("optimizers")
def test_an_inspection_says_what_is_there_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    known = {name: levers()[name] for name in ("loader.num_workers", "optimizer.fused")}
    monkeypatch.setattr("overlap_sweep.levers.process.levers", lambda: known)
    Inspection(str(tmp_path), override=True).install()

    loader = DataLoader(TensorDataset(torch.ones(2)), num_workers=4)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)

    assert (loader.num_workers, optimizer.param_groups[0]["fused"]) == (4, True)
    found = inspected([tmp_path])
    assert {value: why for (name, value), why in found.items() if name == "loader.num_workers"} == {
        1: "",
        2: "",
        4: "is there already",
        8: "",
    }
    assert found["optimizer.fused", True] == "is there already"


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ({}, ["ddp.first_bucket_mb=1"]),
        ({"bucket_cap_mb": 25}, ["ddp.bucket_cap_mb=25", "ddp.first_bucket_mb=25"]),
        ({"bucket_cap_mb_list": [4, 25]}, ["ddp.first_bucket_mb=4"]),
    ],
)
def test_a_size_of_buckets_is_there_only_if_the_first_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], there: list[str]
) -> None:
    class DistributedDataParallel:
        def __init__(self, bucket_cap_mb: int | None = None, bucket_cap_mb_list: list[int] | None = None) -> None:
            self.given = bucket_cap_mb, bucket_cap_mb_list

    module = importlib.import_module("torch.nn.parallel.distributed")
    monkeypatch.setattr(module, "DistributedDataParallel", DistributedDataParallel)
    known = {name: levers()[name] for name in ("ddp.bucket_cap_mb", "ddp.first_bucket_mb")}
    monkeypatch.setattr("overlap_sweep.levers.process.levers", lambda: known)
    Inspection(str(tmp_path), override=True).install()

    DistributedDataParallel(**given)

    found = inspected([tmp_path])
    assert [f"{name}={value}" for (name, value), why in found.items() if why == "is there already"] == there


@pytest.mark.usefixtures("optimizers")
def test_a_mistake_of_the_script_stays_its_own(tmp_path: Path) -> None:
    installed(tmp_path, optimizer__fused=True)

    with pytest.raises(TypeError, match="learning_rate"):
        torch.optim.SGD([nn.Parameter(torch.ones(2))], learning_rate=1.0)  # type: ignore[call-arg]
    assert said(tmp_path) == []


def test_nothing_is_undecided_where_there_is_no_model(tmp_path: Path) -> None:
    made = Levers({"ddp.no_sync": True, "host.collect_every": 1000}, str(tmp_path), override=False)
    assert not made.is_undecided
    try:
        made.at_end_of_step(1)
    finally:
        # What is frozen was before: what tests import, see conftest.py.
        gc.enable()
    assert not made.is_undecided
    assert said(tmp_path) == [
        ("ddp.no_sync", "skipped", "this training has made no DistributedDataParallel"),
        ("host.collect_every", "applied", ""),
    ]


def test_models_synchronise_again_where_microbatches_change() -> None:
    model, synchronised = nn.Linear(1, 1), []
    applying = synchronise_last([model], lambda _, is_last: synchronised.append(is_last))
    assert next(applying) is False
    for _ in range(2):
        model(torch.ones(1))
        model(torch.ones(1))
        assert next(applying) is True
    model(torch.ones(1))

    with pytest.raises(NotApplicable, match="a step had 2, another 1"):
        next(applying)
    model(torch.ones(1))
    assert synchronised == [False, True, False, True]


def test_a_model_that_the_script_has_dropped_is_not_found() -> None:
    model = nn.Bilinear(1, 1, 1)
    model.itself = [model]  # type: ignore[assignment]
    del model

    assert live(nn.Bilinear) == []


def test_a_value_that_is_typed_as_a_text_is_what_it_says() -> None:
    given = {"module": nn.Linear(1, 1), "mesh": SimpleNamespace(ndim=2, size=[2, 16].__getitem__)}
    values = [reshard_after_forward(value, given) for value in ("false", True, "True", 8, "08")]
    assert values == [False, True, True, 8, 8]


def test_a_model_is_found_where_the_script_has_frozen_what_it_made() -> None:
    model = nn.Bilinear(1, 1, 1)
    gc.freeze()
    assert model in live(nn.Bilinear)
    assert gc.get_freeze_count() > 1000
