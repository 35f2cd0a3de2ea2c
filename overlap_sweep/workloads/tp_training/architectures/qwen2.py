"""Qwen 2 and 2.5: Llama with biases in its attention."""

from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("qwen2", qkv_bias=True, megatron=True)
