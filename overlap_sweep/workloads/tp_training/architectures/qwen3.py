"""Qwen 3: queries and keys are normalised within each head."""

from overlap_sweep.workloads.tp_training.architectures.architecture import Architecture

ARCHITECTURE = Architecture("qwen3", head_norms=("self_attn.q_norm", "self_attn.k_norm"), megatron=True)
