"""Mistral, with or without its sliding window."""

from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("mistral", megatron=True, more={"sliding_window": None})
