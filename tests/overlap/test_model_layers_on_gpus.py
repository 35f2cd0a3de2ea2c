"""What Megatron-Core overlaps of layers that are not dense, read from the layers that it builds."""

from typing import Any

import pytest

from overlap_sweep.backends import installed
from overlap_sweep.measure import Ranks
from tests.processes import run_ranks

pytestmark = [
    pytest.mark.skipif(bool(installed.missing(package)), reason=f"needs {package}")
    for package in ("transformer_engine", "megatron.core")
]

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 128}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
FLAGS = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_bulk_dgrad")


def overlapped_linears(ranks: Ranks) -> dict[str, set[str]]:
    """By model, the linears of two layers that overlap, with the number of their layer."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from overlap_sweep.backends.transformer_engine import userbuffers

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    random.model_parallel_cuda_manual_seed(0)
    userbuffers.initialize(tokens=256, hidden_size=256, tp_size=2, fp8=False, bootstrap_backend="gloo", ub_cfgs={})
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512}
    how: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}
    how |= {"add_bias_linear": False, "bf16": True, "params_dtype": torch.bfloat16}
    configs = {
        "dense": TransformerConfig(**sizes, **how),
        "experts": TransformerConfig(**sizes, **how, **EXPERTS),
        "latent": MLATransformerConfig(**sizes, **how, **LATENT, multi_latent_attention=True, rope_type="rope"),
    }
    found = {}
    for name, config in configs.items():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, multi_latent_attention=name == "latent"
        )
        layers = {number: build_module(spec, config=config, layer_number=number) for number in (1, 2)}
        found[name] = {
            f"{number} {linear}"
            for number, layer in layers.items()
            for linear, module in layer.named_modules()
            if any(getattr(module, flag, False) for flag in FLAGS)
        }
    userbuffers.destroy()
    return found


@pytest.mark.gpu(count=2)
def test_what_megatron_core_overlaps_of_each_model() -> None:
    attention = {f"{number} self_attention.linear_{name}" for number in (1, 2) for name in ("qkv", "proj")}
    dense = {f"{number} mlp.linear_{name}" for number in (1, 2) for name in ("fc1", "fc2")}
    shared = {f"{number} mlp.shared_experts.linear_{name}" for number in (1, 2) for name in ("fc1", "fc2")}
    for found in run_ranks(2, overlapped_linears, device="cuda", environment={"UB_SKIPMC": "1"}):
        assert found["dense"] == attention | dense
        assert found["experts"] == attention | shared
        assert found["latent"] == {"1 self_attention.linear_proj"}
