"""userbuffers.py in real process groups, on a fake of the library, which needs a GPU to be imported."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_sweep.backends import Purpose, transformer_engine
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from tests.backends.transformer_engine.fake_library import FakeBase, Mode, fake_library
from tests.make_point import gpu_point
from tests.processes import run_ranks

BULK = {"fc1_dgrad": {"method": "bulk", "num_sm": 4}, "fc1_wgrad": {"method": "bulk", "num_sm": 4}}
RING = {"fc1_fprop": {"method": "ring_exchange", "use_ce": True}}


def initialize(ub_cfgs: dict[str, Any], **changes: Any) -> None:
    from overlap_sweep.backends.transformer_engine import userbuffers

    changes = {"tp_size": dist.get_world_size(), "workload": {"tokens": 64}, **changes}
    userbuffers.initialize_for(gpu_point(**changes), ub_cfgs)


def destroy() -> None:
    transformer_engine.close()


def change_configurations(ranks: Ranks) -> dict[str, Any]:
    own = dist.new_group, dist.new_subgroups_by_enumeration
    with fake_library() as base:
        for settings in (BULK, BULK, {name: dict(setting) for name, setting in BULK.items()}, RING, RING, {}, BULK):
            initialize(settings)
        calls = [call for call in base.calls if call != "synchronize"]
        destroy()
        destroy()
    return {
        "calls": calls,
        "destroyed": base.calls.count("destroy"),
        "torch.compiler resets": len(base.resets),
        "groups": len({id(world) for world, _ in base.groups}),
        "unpatched": own == (dist.new_group, dist.new_subgroups_by_enumeration),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_a_changed_configuration_is_initialised_after_destroying_the_last(world_size: int) -> None:
    expected = {
        "calls": ["initialize", *["destroy", "initialize"] * 3],
        "destroyed": 4,
        # What torch compiled outlives the buffers.
        "torch.compiler resets": 0,
        "groups": 1,
        "unpatched": True,
    }
    assert run_ranks(world_size, change_configurations, keep="cpu") == [expected] * world_size


def what_is_given(ranks: Ranks) -> tuple[list[dict[str, Any]], bool]:
    """And whether the caller's settings are left as they were."""
    mine = {name: dict(setting) for name, setting in BULK.items()}
    with fake_library() as base:
        for settings, precision in ((mine, "bf16"), ({}, "bf16"), (BULK, "fp8_delayed"), (RING, "fp8_block")):
            initialize(settings, precision=precision)
        destroy()
    names = ("ub_cfgs", "shape", "tp_size", "quantization_modes", "dtype", "bootstrap_backend")
    return [{name: one[name] for name in names} for one in base.given], mine == BULK


def test_the_library_is_given_the_configuration_and_changes_no_settings() -> None:
    ((given, untouched),) = run_ranks(1, what_is_given, keep="cpu")
    assert untouched
    assert [one["quantization_modes"] for one in given] == [[Mode.NONE], [Mode.NONE], [Mode.FP8], [Mode.FP8]]
    assert [one["ub_cfgs"] for one in given] == [BULK, None, BULK, RING]
    for one in given:
        assert (one["shape"], one["tp_size"]) == ([64, 256], 1)
        assert (one["dtype"], one["bootstrap_backend"]) == (torch.bfloat16, "gloo")


CUBLASMP: dict[str, Any] = {"with_cublasmp": True, "runtime": {"multicast": False}}


def ask_of_build_and_gpu(ranks: Ranks) -> dict[str, Any]:
    """What is refused before the buffers that there are would be destroyed, and what is given."""

    def refusal(settings: dict[str, Any], **changes: Any) -> str:
        with pytest.raises(Refused) as refused:
            initialize(settings, **changes)
        return str(refused.value)

    with fake_library() as base, pytest.MonkeyPatch.context() as patched:
        patched.setenv("NCCL_NVLS_ENABLE", "0")
        initialize(RING)
        priorities = {"fc1_fprop": {**RING["fc1_fprop"], "comm_priority": -6, "gemm_priority": 0}}
        refused = [refusal(priorities)]
        base.built_with_cublasmp = False
        refused.append(refusal(RING, **CUBLASMP))
        base.built_with_cublasmp = True
        patched.delenv("NCCL_NVLS_ENABLE")
        refused.append(refusal(RING, **CUBLASMP))
        assert base.calls.count("initialize") == 1
        patched.setenv("NCCL_NVLS_ENABLE", "0")
        initialize(RING, **CUBLASMP)
        priorities["fc1_fprop"]["comm_priority"] = -5
        initialize(priorities)
        destroy()
    last = base.given[-1]["ub_cfgs"]["fc1_fprop"]
    return {
        "refused": refused,
        "with_cublasmp": [one["with_cublasmp"] for one in base.given],
        "priorities": [last["comm_priority"], last["gemm_priority"]],
    }


def test_what_this_build_or_gpu_cannot_do_is_refused_before_anything_is_initialised() -> None:
    expected = {
        "refused": [
            "Transformer Engine: fc1_fprop: comm_priority=-6 is not among this GPU's priorities, -5 to 0",
            "Transformer Engine: it was built without cuBLASMp (NVTE_WITH_CUBLASMP=1)",
            "cuBLASMp could use NVLink multicast, since NCCL_NVLS_ENABLE is not 0 in this process",
        ],
        "with_cublasmp": [False, True, False],
        "priorities": [-5, 0],
    }
    assert run_ranks(2, ask_of_build_and_gpu, keep="cpu") == [expected] * 2


def change_replicas(ranks: Ranks) -> tuple[int, list[int]]:
    with fake_library() as base:
        for settings, tp_size in ((BULK, 1), (RING, 1), (BULK, 2), (RING, 2), (BULK, 1), (BULK, 4)):
            initialize(settings, tp_size=tp_size)
        destroy()
    domains = [domain for _, domain in base.groups]
    return len({world for world, _ in base.groups}), [domains.index(domain) for domain in domains]


def test_the_groups_of_every_tp_size_are_made_once() -> None:
    # The domain of all four ranks is the world itself.
    assert run_ranks(4, change_replicas, keep="cpu") == [(1, [0, 0, 2, 2, 0, 5])] * 4


def fail(ranks: Ranks, errors: list[Exception]) -> list[dict[str, Any]]:
    """Of each error of the library, what is raised for it, and what is left."""
    found = []
    for error in errors:
        with fake_library() as base:
            initialize(RING)
            base.fails_with = error
            with pytest.raises((Refused, type(error))) as raised:
                initialize(BULK)
            found.append({"raised": type(raised.value).__name__, "text": str(raised.value)})
            if raised.type is Refused:
                found[-1] |= _after_a_refusal(base)
    return found


def _after_a_refusal(base: FakeBase) -> dict[str, Any]:
    base.calls.clear()
    destroy()
    after = {"initialized": base.initialized, "nothing to destroy": base.calls == []}
    base.fails_with = None
    initialize(BULK)
    destroy()
    return {**after, "again": "initialize" in base.calls}


REFUSED = {
    "At fc1_fprop, that is not supported.": ValueError("At fc1_fprop, that is not supported."),
    "first line": AssertionError("first line\nsecond line"),
    "/src/comm_gemm_overlap.cpp:42 in function f: Assertion failed: atomic_gemm": RuntimeError(
        "/src/comm_gemm_overlap.cpp:42 in function f: Assertion failed: atomic_gemm\n\nmore"
    ),
    "AssertionError": AssertionError(),
}
BROKEN = [
    torch.OutOfMemoryError("no more"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("[/src/userbuffers-host.cpp:42] CUDA Error: out of memory"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp"),
    KeyError("a mistake of ours"),
]


def test_what_the_library_refuses_is_refused_in_its_words_and_what_went_wrong_is_raised() -> None:
    after = {"initialized": False, "nothing to destroy": True, "again": True}
    refused = [{"raised": "Refused", "text": f"Transformer Engine: {text}", **after} for text in REFUSED]
    raised = [{"raised": type(error).__name__, "text": str(error)} for error in BROKEN]
    assert run_ranks(2, fail, [*REFUSED.values(), *BROKEN], keep="cpu") == [[*refused, *raised]] * 2


def destroy_while_another_still_reads(ranks: Ranks) -> tuple[float, float, list[str]]:
    with fake_library() as base:
        initialize(BULK)
        base.calls.clear()
        if ranks.rank == 1:
            time.sleep(0.3)
        done_s = time.monotonic()
        destroy()
    return done_s, base.destroyed_s[0], base.calls


def test_no_rank_takes_down_its_buffers_while_another_may_read_them() -> None:
    found = run_ranks(2, destroy_while_another_still_reads, keep="cpu")
    # One clock for all processes of a machine.
    assert min(destroyed_s for _, destroyed_s, _ in found) >= max(done_s for done_s, _, _ in found)
    assert all(calls == ["synchronize", "destroy"] for _, _, calls in found)


def prepare_for(ranks: Ranks, purposes: list[Purpose]) -> dict[str, list[Any]]:
    found = {}
    for purpose in purposes:
        with fake_library() as base:
            transformer_engine.prepare(gpu_point(tp_size=ranks.world_size), purpose)
            destroy()
        found[purpose] = [given["ub_cfgs"] and sorted(given["ub_cfgs"]) for given in base.given]
    return found


def test_only_what_overlaps_needs_userbuffers() -> None:
    given = {"point": [["fc1_dgrad", "fc1_wgrad"]], "default": [None], "none": [], "floor": [], "tp1": []}
    assert run_ranks(1, prepare_for, list(given), keep="cpu") == [given]
