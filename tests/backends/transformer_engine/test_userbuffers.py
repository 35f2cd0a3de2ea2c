"""userbuffers.py in real process groups, on a fake of the library, which needs a GPU to be imported.

Each function below that takes `ranks` runs in a process of its own, so that what it installs ends with it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.backends import Purpose
from overlap_sweep.errors import Refused
from overlap_sweep.ranks import Ranks
from tests.backends.transformer_engine.fake_library import Mode, install_fake_library
from tests.points import gpu_point
from tests.processes import run_ranks

BULK = {"fc1_dgrad": {"method": "bulk", "num_sm": 4}, "fc1_wgrad": {"method": "bulk", "num_sm": 4}}
RING = {"fc1_fprop": {"method": "ring_exchange", "use_ce": True}}


def wanted(ub_cfgs: dict[str, Any], **changes: Any) -> Any:
    from overlap_sweep.backends.transformer_engine.userbuffers import Userbuffers

    return Userbuffers.of(gpu_point(**{"tp_size": dist.get_world_size(), **changes}), ub_cfgs)


def change_configurations(ranks: Ranks) -> dict[str, Any]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    own = dist.new_group, dist.new_subgroups_by_enumeration
    for settings in (BULK, BULK, {name: dict(setting) for name, setting in BULK.items()}, RING, RING, {}, BULK):
        userbuffers.initialize(wanted(settings))
    calls = [call for call in base.calls if call != "synchronize"]
    userbuffers.destroy()
    userbuffers.destroy()
    return {
        "calls": calls,
        "destroyed": base.calls.count("destroy"),
        "groups": len({id(world) for world, _ in base.groups}),
        "unpatched": own == (dist.new_group, dist.new_subgroups_by_enumeration),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_a_changed_configuration_is_initialised_after_destroying_the_last(world_size: int) -> None:
    for found in run_ranks(world_size, change_configurations):
        assert found["calls"] == ["initialize", *["destroy", "initialize"] * 3]
        assert found["destroyed"] == 4
        assert found["groups"] == 1
        assert found["unpatched"]


def what_is_given(ranks: Ranks) -> list[dict[str, Any]]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    for settings, precision in ((BULK, "bf16"), ({}, "bf16"), (BULK, "fp8_delayed"), (RING, "fp8_current")):
        userbuffers.initialize(wanted(settings, precision=precision, workload={"tokens": 64}))
    names = ("shape", "tp_size", "quantization_modes", "dtype", "bootstrap_backend")
    return [{"slots": sorted(one["ub_cfgs"] or {}), **{name: one[name] for name in names}} for one in base.given]


def test_the_library_is_given_the_configuration() -> None:
    (given,) = run_ranks(1, what_is_given)
    assert [one["quantization_modes"] for one in given] == [[Mode.NONE], [Mode.NONE], [Mode.FP8], [Mode.FP8]]
    assert [one["slots"] for one in given] == [sorted(BULK), [], sorted(BULK), sorted(RING)]
    for one in given:
        assert (one["shape"], one["tp_size"]) == ([64, 256], 1)
        assert (one["dtype"], one["bootstrap_backend"]) == (torch.bfloat16, "gloo")


def settings_of_the_library(ranks: Ranks) -> tuple[list[Any], bool]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    seen: list[Any] = []
    real = base.initialize_ub

    def look(*arguments: Any, **keywords: Any) -> None:
        given = keywords["ub_cfgs"]
        seen.append(given and {slot: dict(setting) for slot, setting in given.items()})
        real(*arguments, **keywords)

    base.initialize_ub = look  # type: ignore[method-assign]
    mine = {name: dict(setting) for name, setting in BULK.items()}
    for settings in (mine, {}):
        userbuffers.initialize(wanted(settings))
    return seen, mine == BULK


def test_the_settings_are_given_as_they_are_and_kept_from_the_librarys_changes() -> None:
    ((seen, untouched),) = run_ranks(1, settings_of_the_library)
    assert seen == [BULK, None]
    assert untouched


def change_replicas(ranks: Ranks) -> tuple[int, list[int]]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    for settings, tp_size in ((BULK, 1), (RING, 1), (BULK, 2), (RING, 2), (BULK, 1), (BULK, 4)):
        userbuffers.initialize(wanted(settings, tp_size=tp_size))
    domains = [domain for _, domain in base.groups]
    return len({world for world, _ in base.groups}), [domains.index(domain) for domain in domains]


def test_the_groups_of_every_tp_size_are_made_once() -> None:
    # The domain of all four ranks is the world itself.
    assert run_ranks(4, change_replicas) == [(1, [0, 0, 2, 2, 0, 5])] * 4


def fail(ranks: Ranks, error: Exception) -> dict[str, Any]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    userbuffers.initialize(wanted(RING))
    base.fails_with = error
    with pytest.raises(Refused) as refused:
        userbuffers.initialize(wanted(BULK))
    base.calls.clear()
    userbuffers.destroy()
    after = {"text": str(refused.value), "initialized": base.initialized, "nothing to destroy": base.calls == []}
    base.fails_with = None
    userbuffers.initialize(wanted(BULK))
    return {**after, "again": "initialize" in base.calls}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("At fc1_fprop, that is not supported."), "At fc1_fprop, that is not supported."),
        (AssertionError("first line\nsecond line"), "first line"),
        (
            RuntimeError("/src/comm_gemm_overlap.cpp:42 in function f: Assertion failed: atomic_gemm\n\nmore"),
            "/src/comm_gemm_overlap.cpp:42 in function f: Assertion failed: atomic_gemm",
        ),
    ],
)
def test_what_the_library_refuses_is_refused_in_its_words(error: Exception, text: str) -> None:
    expected = {"text": f"Transformer Engine: {text}", "initialized": False, "nothing to destroy": True, "again": True}
    assert run_ranks(2, fail, error) == [expected, expected]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no more"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[/src/userbuffers-host.cpp:42] CUDA Error: out of memory"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp"),
    ],
)
def test_what_went_wrong_is_no_refusal(error: Exception) -> None:
    assert run_ranks(1, goes_wrong, error) == [type(error).__name__]


def goes_wrong(ranks: Ranks, error: Exception) -> str:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    base.fails_with = error
    with pytest.raises(type(error)) as raised:
        userbuffers.initialize(wanted(BULK))
    return type(raised.value).__name__


def test_an_error_without_a_word_is_refused_too() -> None:
    (found,) = run_ranks(1, fail, AssertionError())
    assert found["text"].startswith("Transformer Engine: ")
    assert not found["initialized"]


def foreign_error(ranks: Ranks) -> str:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    base.fails_with = KeyError("a mistake of ours")
    with pytest.raises(KeyError) as raised:
        userbuffers.initialize(wanted(BULK))
    return str(raised.value)


def test_other_errors_are_no_refusals() -> None:
    assert run_ranks(1, foreign_error) == ["'a mistake of ours'"]


def destroy_while_another_still_reads(ranks: Ranks) -> tuple[float, float, list[str]]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    userbuffers.initialize(wanted(BULK))
    base.calls.clear()
    if ranks.rank == 1:
        time.sleep(0.3)
    done_s = time.monotonic()
    userbuffers.destroy()
    return done_s, base.destroyed_s[0], base.calls


def test_no_rank_takes_down_its_buffers_while_another_may_read_them() -> None:
    found = run_ranks(2, destroy_while_another_still_reads)
    # One clock for all processes of a machine.
    assert min(destroyed_s for _, destroyed_s, _ in found) >= max(done_s for done_s, _, _ in found)
    assert all(calls == ["synchronize", "destroy"] for _, _, calls in found)


def compile_and_destroy(ranks: Ranks) -> tuple[int, bool]:
    base = install_fake_library()
    from overlap_sweep.backends.transformer_engine import userbuffers

    resets: list[None] = []
    torch.compiler.reset = own = lambda: resets.append(None)
    for settings in (BULK, RING):
        userbuffers.initialize(wanted(settings))
    userbuffers.destroy()
    assert base.calls.count("destroy") == 2
    return len(resets), torch.compiler.reset is own


def test_what_torch_compiled_outlives_the_buffers() -> None:
    assert run_ranks(1, compile_and_destroy) == [(0, True)]


def prepare_for(ranks: Ranks, purpose: Purpose) -> list[Any]:
    base = install_fake_library()
    from overlap_sweep.backends import transformer_engine

    point = gpu_point(tp_size=ranks.world_size)
    transformer_engine.prepare(point, purpose)
    return [given["ub_cfgs"] and sorted(given["ub_cfgs"]) for given in base.given]


@pytest.mark.parametrize(
    ("purpose", "given"),
    [("point", [["fc1_dgrad", "fc1_wgrad"]]), ("default", [None]), ("none", []), ("floor", []), ("tp1", [])],
)
def test_only_what_overlaps_needs_userbuffers(purpose: Purpose, given: list[Any]) -> None:
    assert run_ranks(1, prepare_for, purpose) == [given]
