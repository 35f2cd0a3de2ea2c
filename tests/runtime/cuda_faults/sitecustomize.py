"""On PYTHONPATH of a sweep: makes the points of an operator go wrong on the GPU, as CUDA_FAULTS says by num_sm."""

import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.when_imported import change_when_imported

FAULTS = json.loads(os.environ.get("CUDA_FAULTS", "{}"))


def spoil(fault, ranks):
    import torch

    if fault == "corrupt_context" and ranks.rank == 0:
        beyond = torch.tensor([1 << 40], device=ranks.device)
        torch.zeros(4, device=ranks.device)[beyond].sum().item()
    elif fault == "out_of_memory":
        torch.empty(1 << 44, dtype=torch.uint8, device=ranks.device)
    elif fault == "hang":
        torch.cuda._sleep(1 << 62)
        torch.cuda.synchronize()


def with_faults(run):
    def faulty(point, directory, ranks):
        spoil(FAULTS.get(str(point["num_sm"])), ranks)
        return run(point, directory, ranks)

    return faulty


def spoil_workload(module):
    module.WORKLOAD = dataclasses.replace(module.WORKLOAD, run=with_faults(module.WORKLOAD.run))


if FAULTS:
    change_when_imported({"overlap_sweep.workloads.operator": spoil_workload})
