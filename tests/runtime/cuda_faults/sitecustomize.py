"""On PYTHONPATH of a sweep: makes the points of an operator go wrong on the GPU, as CUDA_FAULTS says by num_sm."""

import dataclasses
import importlib.abc
import importlib.util
import json
import os
import sys

TARGET = "overlap_sweep.workloads.operator"
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


class Spoiler(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            module.WORKLOAD = dataclasses.replace(module.WORKLOAD, run=with_faults(module.WORKLOAD.run))

        spec.loader.exec_module = execute_and_patch
        return spec


if FAULTS:
    sys.meta_path.insert(0, Spoiler())
