"""Runs the tests of several GPUs with all ranks on one: `python -m tests.one_gpu [pytest's arguments]`.

The GPU's contexts take turns, also where kernels wait for each other, so that collectives and userbuffers compute what
they do on several GPUs, a hundred times slower. What is computed, refused and written is tested so; times say nothing.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {
    "RANKS_ON_ONE_GPU": "2",
    # Each rank is a machine to NCCL, and all of them are this one.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
LEFT_OUT = (
    # They compare times.
    "tests/workloads/fsdp/test_fsdp_on_gpus.py::test_marks",
    "tests/workloads/fsdp/test_fsdp_on_gpus.py::test_nothing_overlaps",
    # NCCL's windows need ranks of one machine.
    "tests/workloads/fsdp/test_fsdp_on_gpus.py::test_symmetric_memory",
    # A fault would be in the GPU of all ranks.
    "tests/runtime/test_faults_on_gpus.py",
)
"""Beginnings of the names of tests."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "preload.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "preload.c", "-ldl"], check=True)
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "LD_PRELOAD": str(library)}
        left_out = [f"--deselect={name}" for name in LEFT_OUT]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *left_out, *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=environment, cwd=HERE.parent.parent).returncode)


main()
