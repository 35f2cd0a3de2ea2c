import subprocess
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from overlap_sweep.results import identity
from overlap_sweep.results.identity import gpu_links

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
