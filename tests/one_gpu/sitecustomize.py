"""Puts all ranks on the first GPU, in every process that `python -m tests.one_gpu` starts."""

import os
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.when_imported import change_when_imported

RANKS = int(os.environ.get("RANKS_ON_ONE_GPU", "0"))


def pretend_gpus(gpus: ModuleType) -> None:
    vars(gpus)["visible_gpus"] = lambda: RANKS


def share_gpu(worker: ModuleType) -> None:
    import torch

    def own_gpu() -> torch.device:
        # NCCL refuses two ranks on one GPU of one machine.
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
        return torch.device("cuda", 0)

    vars(worker)["own_gpu"] = own_gpu


def read_one_gpu(environment: ModuleType) -> None:
    import torch

    read = environment.nvml_handle
    vars(environment)["nvml_handle"] = lambda device: read(torch.device("cuda", 0))


if RANKS and "RANK" in os.environ and "OVERLAP_SWEEP_RECORD" in os.environ:
    # A training of a user's, which chooses its GPU itself.
    os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank {os.environ['RANK']}"}
if RANKS:
    change_when_imported(
        {
            "overlap_sweep.gpus": pretend_gpus,
            "overlap_sweep.runtime.worker": share_gpu,
            "overlap_sweep.measure.environment": read_one_gpu,
        }
    )
