"""A point that ruins its GPU's context stays one failed point."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from overlap_sweep.backends import installed
from tests.sweeps import Launch

FAULTS = {2: "corrupt_context", 3: "out_of_memory", 4: "hang"}
"""By num_sm. What needs no GPU to go wrong, and resuming, is tested on CPUs."""
INJECTED = Path(__file__).parent / "cuda_faults"
SMALL = (
    *("model=llama3_8b", "workload.tokens=1024", "workload.repeats=3", "profile=none", "backend=transformer_engine"),
    *("tp_size=2", "num_sm=1,2,3,4,5", "runtime.timeout_s=15", "runtime.retries=0"),
)


def used_memory_mib() -> list[int]:
    """Of the GPUs that the workers see."""
    visible = [f"--id={ids}"] if (ids := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    asked = ["nvidia-smi", *visible, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.gpu(count=2)
@pytest.mark.timeout(580)
# It looks at the memory of the GPUs, which tests beside it use.
@pytest.mark.quiet
@pytest.mark.skipif(bool(installed.missing()), reason="needs Transformer Engine")
def test_what_ruins_a_context_fails_its_point_only(tmp_path: Path) -> None:
    before_mib = used_memory_mib()
    path = os.pathsep.join(filter(None, (str(INJECTED), os.environ.get("PYTHONPATH"))))
    faults = json.dumps({str(num_sm): fault for num_sm, fault in FAULTS.items()})
    launch = Launch(tmp_path, {"PYTHONPATH": path, "CUDA_FAULTS": faults})
    process = launch.start("-m", *SMALL)
    stdout, stderr = process.communicate(timeout=560)
    results = {result.recorded["num_sm"]: result for result in launch.results().values()}
    assert {num_sm: result.status for num_sm, result in results.items()} == {
        **dict.fromkeys((1, 5), "ok"),
        **dict.fromkeys((2, 3), "failed"),
        4: "timeout",
    }, stdout + stderr
    # NCCL's watchdog may end the process before the worker has answered.
    assert "device-side assert" in str(results[2].error) or "rank 0 died" in str(results[2].error)
    assert "out of memory" in str(results[3].error)
    assert "no answer from ranks" in str(results[4].error)
    assert "2 ok, 2 failed, 1 timeout" in stdout
    assert process.returncode == 1
    assert launch.processes() == {}
    # What a killed process held is given back by the driver.
    assert all(after - before < 1000 for before, after in zip(before_mib, used_memory_mib(), strict=True))
