"""Llama 1 to 3."""

from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("llama", megatron=True)
