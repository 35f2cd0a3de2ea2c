"""Which changes make another measurement of it, and what is recorded of a machine."""

import copy
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.results import identity
from overlap_sweep.results.identity import environment_identity, gpu_links, key_of, library_identity, point_identity
from overlap_sweep.results.registry import decoded_point
from tests.make_point import resolved

CPU = {
    "host": "node1",
    "platform": "Linux-6.1",
    "python": "3.11.2",
    "device": "cpu",
    "cpu": "AMD EPYC 9654",
    "cpu_count": 96,
    "packages": {"torch": "2.13.0", "transformer-engine": None, "megatron-core": None, "overlap-sweep": "0.1.0"},
    "variables": {"OMP_NUM_THREADS": "1", "UB_SKIPMC": "1", "NVTE_FLASH_ATTN": None},
}
GPU = {
    **CPU,
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "gpus": ["NVIDIA H200"],
    "driver": "580.1",
    "topology": "a drawing with network cards",
    "links": ["NV18"],
}
POINT = resolved("operator", method="bulk", num_sm=4)


@pytest.mark.parametrize("name", ["timeout_s", "timeout_factor", "start_timeout_s", "retries", "isolate"])
def test_how_a_point_is_run_is_no_part_of_it_and_it_is_not_changed(name: str) -> None:
    other = {**POINT, "runtime": {**POINT["runtime"], name: 7}}
    assert point_identity(other) == point_identity(POINT)
    assert other["runtime"][name] == 7 != POINT["runtime"][name]


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_sm": 5}, {"repetition": 1}, {"precision": "fp32"}, {"profile": "all"}, {"model.hidden_size": 512}),
        *({"workload.repeats": 4}, {"workload.tolerance": 0.1}, {"runtime.threads_per_rank": 2}),
        *({"runtime.multicast": True}, {"runtime.device": "cpu"}, {"runtime.bootstrap_backend": "nccl"}),
    ],
)
def test_what_is_measured_is(changes: dict[str, Any]) -> None:
    assert point_identity(resolved("operator", **{"method": "bulk", "num_sm": 4, **changes})) != point_identity(POINT)


def test_a_point_without_the_options_that_look_into_it_is_that_of_earlier_versions() -> None:
    later = ("debug", "nvtx", "nsys", "nsys_args", "ub_timeout_s")
    earlier = {name: value for name, value in POINT["runtime"].items() if name not in later}
    assert point_identity(decoded_point({**POINT, "runtime": earlier})) == point_identity(POINT)
    for name in ("debug", "nvtx", "nsys"):
        assert point_identity(resolved("operator", POINT, **{f"runtime.{name}": True})) != point_identity(POINT)
    # How long a kernel waits before it gives up is none of its times.
    assert environment_identity({**GPU, "variables": {**GPU["variables"], "UB_TIMEOUT": "20"}}) == environment_identity(
        GPU
    )


def test_what_is_null_is_no_part_of_it_at_any_depth() -> None:
    later = {**POINT, "of_tomorrow": None, "model": {**POINT["model"], "rope": None}}
    assert point_identity(later) == point_identity(POINT)
    assert point_identity({**POINT, "of_tomorrow": False}) != point_identity(POINT)


def changed(environment: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """`name` may be dotted."""
    other = copy.deepcopy(environment)
    part, _, key = name.rpartition(".")
    (other[part] if part else other)[key] = value
    return other


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("packages.torch", "2.14.0"), ("packages.transformer-engine", "2.10"), ("packages.megatron-core", "0.17")),
        *(("packages.nccl", "2.27.3"), ("variables.NCCL_MAX_CTAS", "8"), ("variables.NVTE_FLASH_ATTN", "0")),
        *(("variables.UB_SKIPMC", None), ("variables.CUDA_DEVICE_MAX_CONNECTIONS", "1")),
        *((f"variables.{library}_X", "1") for library in ("TORCH_SYMM_MEM", "NVSHMEM", "FLUX")),
        *(("gpus", ["NVIDIA H100 80GB HBM3"]), ("driver", "570.2"), ("links", ["NODE", "SYS"])),
        *(("device", "cpu"), ("device", "xpu")),
    ],
)
def test_another_environment(name: str, value: Any) -> None:
    assert environment_identity(changed(GPU, name, value)) != environment_identity(GPU)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("host", "node2"), ("platform", "Linux-6.2"), ("python", "3.12.1"), ("topology", "another drawing")),
        # What only torch knows, and so only a result has.
        *(("sm_count", 132), ("cudnn", 91900), ("gpu_count", 4)),
        # On a GPU the CPU hardly counts.
        *(("cpu", "another"), ("cpu_count", 2)),
        *(("packages.overlap-sweep", "9.9"), ("variables.OMP_NUM_THREADS", "2"), ("variables.NCCL_DEBUG", "INFO")),
        *(("variables.NVTE_DEBUG_LEVEL", "2"), ("variables.CUDNN_HOME", "/opt")),
    ],
)
def test_the_same_environment(name: str, value: Any) -> None:
    assert environment_identity(changed(GPU, name, value)) == environment_identity(GPU)


def test_on_a_cpu_the_cpu_counts() -> None:
    assert environment_identity({**CPU, "host": "node2"}) == environment_identity(CPU)
    for other in ({"cpu_count": 2}, {"cpu": "another"}):
        assert environment_identity({**CPU, **other}) != environment_identity(CPU)


def test_libraries_are_known_without_a_gpu() -> None:
    """As on a login node."""
    assert library_identity({**CPU, "host": "login"}) == library_identity(GPU)
    assert library_identity(changed(CPU, "packages.torch", "2.14.0")) != library_identity(GPU)


def test_an_environment_that_tells_little_is_no_error() -> None:
    assert environment_identity({}) != environment_identity(GPU)
    assert set(library_identity({})["packages"].values()) == {None}


words = st.text("abc", max_size=3)
identities = st.dictionaries(words, st.one_of(st.none(), st.integers(), words, st.lists(words, max_size=2)), max_size=4)


@given(identities, identities)
def test_a_key_is_equal_just_for_equal_identities(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert (key_of(first) == key_of(second)) == (first == second)
    assert key_of(dict(reversed(first.items()))) == key_of(first)


HGX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-55,112-167\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t56-111,168-223\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t56-111,168-223\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tSYS\tSYS\tPHB\t0-31\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tSYS\tPHB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNODE\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPHB\tPHB\tSYS\tSYS\t X
"""
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
SIXTEEN = "\t" + "\t".join(f"GPU{column}" for column in range(16)) + "\n"
SIXTEEN += "".join(
    f"GPU{row}\t" + "\t".join(" X " if row == column else "NV6" for column in range(16)) + "\t0-47\t0\n"
    for row in range(16)
)


@pytest.mark.parametrize(
    ("topology", "links"),
    [
        (HGX, ["NV18"]),
        (PCIE, ["NODE", "PIX", "SYS"]),
        (ALONE, []),
        (SIXTEEN, ["NV6"]),
        ("", []),
        ("Failed to initialize NVML: Driver/library version mismatch\n", []),
    ],
)
def test_links_between_gpus(topology: str, links: list[str]) -> None:
    assert gpu_links(topology) == links


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    """What nvidia-smi answered to one test is not another's machine."""
    identity._gpus.cache_clear()
    yield
    identity._gpus.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, query: str, topology: str) -> dict[str, Any]:
    """What is recorded of a machine whose nvidia-smi answers this."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, topology if "topo" in command else query)

    monkeypatch.setattr(subprocess, "run", run)
    return identity.machine("cuda", {}, 2)


def test_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    underlined = HGX.replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1).replace("GPU NUMA ID\n", "GPU NUMA ID\x1b[0m\n", 1)
    found = answer(monkeypatch, "NVIDIA H100 80GB HBM3, 570.86.15\n" * 4, underlined)
    assert (found["gpu"], found["gpus"]) == ("NVIDIA H100 80GB HBM3", ["NVIDIA H100 80GB HBM3"])
    assert (found["driver"], found["links"], found["topology"]) == ("570.86.15", ["NV18"], HGX)


def test_gpus_that_differ_have_no_common_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(monkeypatch, "NVIDIA L40S, 570.1\nNVIDIA A10, 570.1\n", PCIE)
    assert (found["gpu"], found["gpus"]) == (None, ["NVIDIA A10", "NVIDIA L40S"])


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20), subprocess.CalledProcessError(9, "")]
)
def test_without_nvidia_smi_nothing_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=error))
    found = identity.machine("cuda", {}, 2)
    nothing = {"gpu": None, "gpus": [], "driver": None, "topology": None, "links": []}
    assert {name: found[name] for name in nothing} == nothing


def test_on_a_cpu_no_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    found = identity.machine("cpu", {"NVTE_X": "1", "UB_Y": "2", "NCCL_Z": "3", "HOME": "/root"}, 2)
    assert "links" not in found
    assert found["cpu"]
    assert found["packages"]["torch"]
    variables = found["variables"]
    assert {"NVTE_X": "1", "UB_Y": "2", "NCCL_Z": "3", "CUDA_DEVICE_MAX_CONNECTIONS": None}.items() <= variables.items()
    assert "HOME" not in variables
