"""What a point of workload=tp_training is; which are refused is in tests/golden/expected/refusals."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.runtime.group_config import GroupConfig
from overlap_sweep.workloads import tp_training
from overlap_sweep.workloads.tp_training import hugging_face
from overlap_sweep.workloads.tp_training.config import DATA_PARALLEL_OPTIONS, Resolved
from overlap_sweep.workloads.tp_training.rows import options_of
from tests.composed import composed, tp_point


def test_a_point_says_all_that_is_trained() -> None:
    point = tp_point("impl=fsdp_dtensor", "dp_size=2", "tp_training.gradient_accumulation_steps=3")
    assert (point.backend, point.precision, point.tp_size, point.dp_size) == ("fsdp_dtensor", "fp32", 2, 2)
    assert point.world_size == 4
    # Two sequences of 16 tokens a micro batch, three of them, on two data-parallel ranks.
    assert point.workload.tokens == 2 * 16 * 3 * 2
    assert point.workload.repeats == 4
    fields = point.language_model
    assert (fields["model_type"], fields["num_hidden_layers"], fields["vocab_size"]) == ("qwen3", 2, 1019)
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 1_000_000.0}


OF = "tp_training."


@pytest.mark.parametrize(
    ("same", "given"),
    [
        # All ranks instead of the data-parallel ones; an experiment's ranks are no obstacle.
        ("tp_size=2 dp_size=2", "tp_size=2 ranks=4"),
        ("tp_size=2 dp_size=1", "tp_size=2 dp_size=1 ranks=4"),
        # Options of other implementations, and nulls, which are the usual.
        ("impl=fsdp_dtensor", f"impl=fsdp_dtensor {OF}zero_stage=2 {OF}tp_comm_overlap=false"),
        *(
            (f"impl={impl}", f"impl={impl} {OF}zero_stage=null {OF}attn_impl=null {OF}tp_comm_overlap=null")
            for impl in ("autotp", "megatron")
        ),
        # What another option switches off.
        *(
            (f"dp_size=2 {first}", f"dp_size=2 {first} {second}")
            for first, second in (
                (f"impl=autotp {OF}zero_stage=0", f"{OF}overlap_comm=true"),
                (f"impl=megatron {OF}overlap_grad_reduce=false", f"{OF}ddp_bucket_size=1000"),
                (f"impl=megatron {OF}use_distributed_optimizer=false", f"{OF}overlap_param_gather=false"),
                (f"impl=fsdp_dtensor {OF}reshard_after_forward=false", f"{OF}backward_prefetch=2"),
            )
        ),
        # Zero layers are the model's own number.
        ("", "model.num_layers=0"),
        ("model=llama3_8b", "model=llama3_8b model.num_layers=0"),
    ],
)
def test_what_changes_nothing_makes_no_other_point(same: str, given: str) -> None:
    assert tp_point(*same.split()) == tp_point(*given.split())


@pytest.mark.parametrize("impl", ["autotp", "fsdp_dtensor", "megatron"])
def test_a_point_from_before_an_option_is_that_with_its_default(impl: str) -> None:
    new = tp_point(f"impl={impl}", "dp_size=2")
    old = dict(new)
    old["tp_training"] = {
        name: value for name, value in new["tp_training"].items() if name not in DATA_PARALLEL_OPTIONS
    }
    assert point_key(decoded_point(old)) == point_key(new)


def test_options_of_an_implementation_are_kept() -> None:
    assert tp_point("impl=autotp", "tp_training.zero_stage=2").tp_training.zero_stage == 2
    assert tp_point("impl=megatron").tp_training.attn_impl is None


@pytest.mark.parametrize(
    ("impl", "given", "kept"),
    [
        ("megatron", "overlap_grad_reduce=true", {}),
        ("megatron", "overlap_param_gather=true", {}),
        ("megatron", "overlap_comm=true", {}),
        ("megatron", "use_distributed_optimizer=false", {"use_distributed_optimizer": False}),
        ("megatron", "overlap_param_gather=false", {"overlap_param_gather": False}),
        ("megatron", "ddp_bucket_size=1000", {"ddp_bucket_size": 1000}),
        ("autotp", "overlap_comm=false", {}),
        ("autotp", "overlap_comm=true", {"overlap_comm": True}),
        ("autotp", "reduce_bucket_size=null", {}),
        ("fsdp_dtensor", "backward_prefetch=1", {}),
        ("async_tp", "forward_prefetch=2", {"forward_prefetch": 2}),
    ],
)
def test_data_parallelism_is_part_of_a_point_where_it_changes_what_is_run(
    impl: str, given: str, kept: dict[str, Any]
) -> None:
    """Otherwise it is the point that it was before there was the option."""
    plain, changed = (
        asdict(tp_point(f"impl={impl}", "dp_size=2", *more).tp_training) for more in ((), (f"tp_training.{given}",))
    )
    assert all(plain[name] is None for name in DATA_PARALLEL_OPTIONS)
    assert {name: value for name, value in changed.items() if value != plain[name]} == kept
    alone = tp_point(f"impl={impl}", f"tp_training.{given}").tp_training
    assert all(getattr(alone, name) is None for name in DATA_PARALLEL_OPTIONS)


@pytest.mark.parametrize(
    ("impl", "in_sequence", "compiled"),
    [("autotp", False, False), ("fsdp_dtensor", False, False), ("async_tp", True, True), ("megatron", True, False)],
)
def test_who_overlaps_has_its_sequence_cut(impl: str, in_sequence: bool, compiled: bool) -> None:
    training = tp_point(f"impl={impl}").tp_training
    assert (training.sequence_parallel, training.compile) == (in_sequence, compiled)
    assert not tp_point(f"impl={impl}", "tp_size=1").tp_training.sequence_parallel


def test_implementations_share_no_process() -> None:
    configs = {GroupConfig.of(tp_point(f"impl={impl}")) for impl in ("autotp", "fsdp_dtensor", "megatron")}
    assert len(configs) == 3
    assert GroupConfig.of(tp_point("impl=megatron")).max_connections == 1
    assert GroupConfig.of(tp_point("impl=autotp")).max_connections == 8


def test_variables_of_nccl_are_an_option_of_a_setting() -> None:
    point = tp_point("impl=megatron", "+tp_training.env.NCCL_MAX_CTAS=8", "+tp_training.env.NCCL_ALGO=null")
    assert ("NCCL_MAX_CTAS", "8") in GroupConfig.of(point).environment
    options = options_of(point)
    assert {name: value for name, value in options.items() if "env" in name} == {"tp_training.env.NCCL_MAX_CTAS": "8"}
    assert point_key(point) != point_key(tp_point("impl=megatron"))
    assert tp_point("impl=megatron").tp_training.env is None
    with pytest.raises(UserError, match=r"tp_training\.env\.PATH is not a variable of NCCL"):
        tp_point("impl=megatron", "+tp_training.env.PATH=x")


def test_a_tuned_file_becomes_part_of_the_point(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("# Switches:\n#   tp_comm_bulk_wgrad: false\nfc1_fprop:\n  method: ring_exchange\n  num_sm: 1\n")
    point = tp_point("impl=megatron", f"tp_training.tp_comm_overlap_cfg={path}")
    (config,) = tp_training.WORKLOAD.overlap_configs(point).values()
    assert config.slots == {"fc1_fprop": {"method": "ring_exchange", "num_sm": 1}}
    assert not config.switches["tp_comm_bulk_wgrad"]
    # The others ignore it, so that all can be swept together.
    assert (
        tp_training.WORKLOAD.overlap_configs(tp_point("impl=autotp", f"tp_training.tp_comm_overlap_cfg={path}")) == {}
    )


CONFIG = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 333},
    **{"rope_theta": 12345.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
}


def hf_point(root: Path, *overrides: str, **config: Any) -> Resolved:
    (root / "config.json").write_text(json.dumps({**CONFIG, **config}))
    unset = [f"model.{name}=null" for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads")]
    return tp_point("model=hf", f"model.name={root}", *unset, *overrides)


def test_a_hugging_face_config_is_trained_as_it_is_but_for_what_is_given(tmp_path: Path) -> None:
    assert hf_point(tmp_path, "model.num_layers=0") == hf_point(tmp_path)
    fields = hf_point(tmp_path).language_model
    said = {name: fields[name] for name in ("model_type", "num_hidden_layers", "vocab_size", "rms_norm_eps")}
    assert said == {"model_type": "qwen2", "num_hidden_layers": 6, "vocab_size": 333, "rms_norm_eps": 1e-5}
    assert (fields["rope_parameters"]["rope_theta"], fields["tie_word_embeddings"]) == (12345.0, True)
    given = ("model.num_layers=3", "model.rope_theta=500000", "model.tie_word_embeddings=false")
    fields = hf_point(tmp_path, *given).language_model
    assert (fields["num_hidden_layers"], fields["vocab_size"]) == (3, 333)
    assert (fields["rope_parameters"]["rope_theta"], fields["tie_word_embeddings"]) == (500_000.0, False)
    # What concerns stored weights is no part of the point.
    stored = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float16", "pad_token_id": 7}
    assert hf_point(tmp_path, **stored) == hf_point(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_each_layer_has_its_type_whatever_their_number(tmp_path: Path, model_type: str) -> None:
    narrow = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    for layers in (6, 3, 9):
        fields = hf_point(tmp_path, f"model.num_layers={layers}", model_type=model_type, **narrow).language_model
        with torch.device("meta"):
            model: Any = hugging_face.whole_model(fields, "sdpa")
        assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * (layers - 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "has no rotary embedding"),
        ({"model_type": "gemma2"}, "model.architecture=gemma2 cannot be trained; choose one of llama"),
        ({"model_type": "llama", "num_attention_heads": 6}, "not a multiple of the number of attention heads (6)"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        hf_point(tmp_path, **config)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_parameters_and_flops_are_those_that_are_published() -> None:
    llama, qwen3 = (
        composed("workload=tp_training", "runtime.device=cpu", f"model={name}").trained
        for name in ("llama3_8b", "qwen3_32b")
    )
    # 8.03 billion, norms included.
    assert llama.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert qwen3.parameters == pytest.approx(32.76e9, rel=1e-3)
    without_attention = llama.flops_per_token(0)
    assert without_attention == 6 * (llama.parameters - 128256 * 4096)
    assert llama.flops_per_token(2048) - without_attention == 12 * 32 * 4096 * 2048
