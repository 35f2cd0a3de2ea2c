"""On PYTHONPATH of `python -m tests.one_gpu`: in every process that it starts all ranks are on the first GPU."""

import importlib.abc
import importlib.util
import os
import sys

RANKS = int(os.environ.get("RANKS_ON_ONE_GPU", "0"))


def pretend_gpus(group_config):
    group_config.visible_gpus = lambda: RANKS


def share_gpu(worker):
    import torch

    def own_gpu():
        # NCCL refuses two ranks on one GPU of one machine.
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
        return torch.device("cuda", 0)

    worker.own_gpu = own_gpu


def read_one_gpu(environment):
    import torch

    read = environment.nvml_handle
    environment.nvml_handle = lambda device: read(torch.device("cuda", 0))


PATCHES = {
    "overlap_sweep.runtime.group_config": pretend_gpus,
    "overlap_sweep.runtime.worker": share_gpu,
    "overlap_sweep.measure.environment": read_one_gpu,
}


class Patcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


if RANKS:
    sys.meta_path.insert(0, Patcher())
