"""A causal language model: the architectures that can be trained, the fields of its Hugging Face config, what there is
in it to hold and to compute, and how much of that a GPU can. No torch: the launcher asks, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.config import ResolvedModel
from overlap_sweep.declared import Count
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms
from overlap_sweep.overlap.model_forms import Form
from overlap_sweep.workloads.memory import DenseLayer

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Architecture:
    """What must be known of a model to build it and to cut it over the ranks. The defaults are Llama's, which most
    decoders follow. Names of modules are relative to a decoder layer."""

    column_parallel: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    """Their outputs are cut: heads, columns of the MLP."""
    row_parallel: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Their inputs are cut, and their outputs summed over the ranks."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of the residual stream."""
    head_norms: tuple[str, ...] = ()
    """Norms within each head: every rank has the whole weight and sees its own heads, so that gradients are summed."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    """Rotary embedding, the only module whose buffers are computed again; empty: the model has no buffers."""
    output: str = "lm_head"
    qkv_bias: bool = False
    megatron: bool = False
    """Megatron-Core's model computes what Hugging Face's does, which test_megatron_architectures.py holds it to.
    impl=megatron refuses all others."""
    create_model: Callable[[Mapping[str, Any], str], nn.Module] | None = None
    """Returns the model for the config's fields and `tp_training.attn_impl`, in float32 on torch's default device,
    which is `meta`. It is called like Hugging Face's models, and has a `config` with `hidden_size` and
    `tie_word_embeddings`. None: AutoModelForCausalLM makes it."""
    get_tp_mapping: Callable[[bool], Mapping[str, ParallelStyle]] | None = None
    """Returns DTensor's parallel styles by module of a layer, for fsdp_dtensor and async_tp. Its argument says whether
    activations between layers are cut by sequence (dimension 1) or whole. None: made from `column_parallel` and
    `row_parallel`, which AutoTP always uses."""
    form: Form = field(default_factory=Form)
    """Of another package's: which fields of the config have the sizes."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Further fields of its Hugging Face config, where no config.json gives them."""


ARCHITECTURES = {
    # Llama 1 to 3.
    "llama": Architecture(megatron=True),
    # With or without its sliding window.
    "mistral": Architecture(megatron=True, more={"sliding_window": None}),
    # Also 2.5: Llama with biases in its attention.
    "qwen2": Architecture(qkv_bias=True, megatron=True),
    # Queries and keys are normalised within each head.
    "qwen3": Architecture(head_norms=("self_attn.q_norm", "self_attn.k_norm"), megatron=True),
}
"""By Hugging Face's model_type, which decides config class and model class. A new architecture is a new line."""


def architecture(model_type: str) -> Architecture:
    """Returns what is known of a model_type, from here or from another package; UserError for an unknown one, or if
    that package is broken."""
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    registered = model_forms.registered_architectures()
    if model_type not in registered:
        known = ", ".join(sorted({*ARCHITECTURES, *registered}))
        raise UserError(
            f"model.architecture={model_type} cannot be trained; choose one of {known}, or add it "
            "(docs/tp_training.md)."
        )
    found: Architecture = model_forms.load_architecture(model_type)
    if not isinstance(found, Architecture):
        value = registered[model_type].value
        raise UserError(f"model.architecture={model_type}: {value} is not an Architecture; fix or remove that package.")
    return found


class LanguageModel(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Hugging Face config that a model is built by, or its weights are drawn by."""

    model_type: str
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: float | None = None
    """None: it normalises otherwise."""
    tie_word_embeddings: bool
    rope_parameters: dict[str, object]
    initializer_range: float = 0.02

    @property
    def layer(self) -> DenseLayer:
        return DenseLayer(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            gated_mlp=True,
        )

    @property
    def layers_parameters(self) -> int:
        """Returns the number of parameters in the layers' GEMMs. Norms and biases are left out."""
        return self.num_hidden_layers * self.layer.parameters

    @property
    def parameters(self) -> int:
        """Returns the number of the whole model's parameters, without norms and biases, some millionths of it."""
        matrices = 1 if self.tie_word_embeddings else 2
        return self.layers_parameters + matrices * self.vocab_size * self.hidden_size

    def flops_per_token(self, seq_length: int) -> float:
        """Returns the FLOPs of forward and backward, as PaLM counts them (arXiv:2204.02311, appendix B): 6 for each
        parameter in a GEMM, the output projection's included and the embedding's not, and 12 x layers x heads x head
        dimension x sequence for attention, as if it were not causal. Recomputation does not count."""
        gemms = 6 * (self.layers_parameters + self.vocab_size * self.hidden_size)
        return float(gemms + 12 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_length)


_LONGEST_CONTEXT = 131_072
"""Of models given by their sizes: no architecture here computes anything else for a shorter one."""


def language_model(model: ResolvedModel) -> dict[str, Any]:
    """Returns the config fields of a point's model, which win over those of a config.json. UserError if it is not a
    language model, or cannot be trained."""
    if model.instead:
        has = next(iter(model.instead.values()))
        raise UserError(f"model.name={model.name}: {has}; workload=tp_training trains dense models only.")
    fields = model_forms.fields_of(model_forms.read_hf_config(model.name)) if model.source == "hf" else _by_sizes(model)
    if "rope_parameters" not in fields:
        raise UserError(
            f"model.name={model.name} has no rotary embedding, which workload=tp_training requires; choose another "
            "model."
        )
    given = {
        "model_type": model.architecture,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if len(fields.get("layer_types") or ()) != fields["num_hidden_layers"]:
        # One for each layer: for another number of them the config's class says what they are.
        fields.pop("layer_types", None)
    theta = {} if model.rope_theta is None else {"rope_theta": model.rope_theta}
    fields["rope_parameters"] = {"rope_type": "default", **fields["rope_parameters"], **theta}
    architecture(fields["model_type"])
    return fields


def _by_sizes(model: ResolvedModel) -> dict[str, Any]:
    if model.architecture is None:
        raise UserError(
            f"model={model.name} has no architecture, which a language model needs; give model.architecture=llama "
            "or another, or choose a model that has one."
        )
    more = architecture(model.architecture).more
    for name in ("num_layers", "vocab_size"):
        if getattr(model, name) is None:
            raise UserError(f"model={model.name} has no {name}, which a language model needs; give model.{name}.")
    return {
        "hidden_act": "silu",
        "max_position_embeddings": _LONGEST_CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10_000.0},
        **more,
    }


_PEAK_TFLOPS: dict[str, tuple[float | None, float, float]] = {
    r"GB[23]00": (2500.0, 2500.0, 80.0),
    r"B[23]00": (2250.0, 2250.0, 75.0),
    r"H[12]00 NVL": (835.5, 835.5, 60.0),
    r"H[18]00 PCIe": (756.0, 756.0, 51.0),
    r"(GH200|H100|H200|H800)": (989.4, 989.4, 66.9),
    r"H20": (148.0, 148.0, 44.0),
    r"A[18]00": (312.0, 312.0, 19.5),
    r"L40S": (362.0, 362.0, 91.6),
    r"L40": (181.0, 181.0, 90.5),
    r"L4": (121.0, 121.0, 30.3),
    r"A10": (125.0, 125.0, 31.2),
    r"V100-PCIE": (None, 112.0, 14.0),
    r"V100": (None, 125.0, 15.7),
    r"MI355X": (2516.6, 2516.6, 157.3),
    r"MI350X": (2306.9, 2306.9, 144.2),
    r"MI3(00|25)X": (1307.4, 1307.4, 163.4),
    r"MI300A": (980.6, 980.6, 122.6),
}
"""In bf16, fp16 and fp32 (of the vector units: no TF32), dense, of one GPU, by a word of its name, the first that fits.
From NVIDIA's data sheets, whose rates with sparsity are halved, and AMD's. At the boost clock, which a GPU under such
load does not hold."""


def peak_tflops(gpu: str | None, precision: str) -> float | None:
    """Returns the peak of a GPU as torch names it, such as `NVIDIA H100 80GB HBM3`, in bf16, fp16 or fp32; None if
    unknown."""
    for word, peaks in _PEAK_TFLOPS.items():
        if gpu and re.search(rf"\b{word}\b", gpu):
            return dict(zip(("bf16", "fp16", "fp32"), peaks, strict=True)).get(precision)
    return None


_OF_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
"""Fields of sliding windows, which are refused where they would be narrower than the sequence."""
_NO_DIFFERENCE = {"max_position_embeddings", "original_max_position_embeddings", "max_length", "rope_scaling"}
"""Fields without effect on the default rotary embedding; transformers has moved `rope_scaling` to rope_parameters."""
_ONLY: dict[str, tuple[str | bool, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
"""Values that Megatron-Core is configured for. A missing bias is none."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROPE: dict[str, object] = {"rope_type": "default", "partial_rotary_factor": 1.0}
_LLAMA = Architecture()
_FORM = ("column_parallel", "row_parallel", "layer_norms")
"""Fields of an Architecture in which GPTModel is Llama's."""
_HEAD_NORMS = ((), ("self_attn.q_norm", "self_attn.k_norm"))


def megatron_refusals(model: LanguageModel, fields: Mapping[str, object], seq_length: int) -> Iterator[str]:
    """Yields what Megatron-Core's GPTModel would compute otherwise. What it computes is listed: an unknown field of the
    config may change the model. `fields`: all of the model's."""
    of = architecture(model.model_type)
    if not of.megatron:
        same = ", ".join(name for name, one in sorted(ARCHITECTURES.items()) if one.megatron)
        yield f"impl=megatron supports the architectures {same}, not {model.model_type}"
    differs = [name for name in _FORM if getattr(of, name) != getattr(_LLAMA, name)]
    for name in differs + ["head_norms"] * (of.head_norms not in _HEAD_NORMS):
        has = f"{name}={_listed(getattr(of, name))}"
        yield f"impl=megatron has Llama's layers; those of {model.model_type} have {has}"
    yield from _field_refusals(model, fields)
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if isinstance(window, int) and window < seq_length:
        yield f"impl=megatron has no sliding window; the model's sliding_window={window} is shorter than the sequence"


def _field_refusals(model: LanguageModel, fields: Mapping[str, object]) -> Iterator[str]:
    for name, value in model.rope_parameters.items():
        if name not in ("rope_theta", *_ROPE, *_NO_DIFFERENCE) or value != _ROPE.get(name, value):
            yield f"impl=megatron supports only the default rotary embedding; the model's has {name}={value}"
    for name, values in _ONLY.items():
        if (own := fields.get(name, values[0])) not in values:
            yield f"impl=megatron supports only {name}={values[0]}; the model has {name}={own}"
    types = fields.get("layer_types")
    if others := set(types if isinstance(types, list) else ()) - _LAYER_TYPES:
        yield f"impl=megatron supports only full attention; the model has layer_types={_listed(sorted(others))}"
    if model.rms_norm_eps is None:
        yield "impl=megatron normalises by RMSNorm; the model's config has no rms_norm_eps"
    known = {*LanguageModel.__struct_fields__, *_OF_WINDOW, *_NO_DIFFERENCE, *_ONLY}
    for name in sorted(fields.keys() - known):
        # What is switched off changes nothing.
        if fields[name] is not None and fields[name] is not False:
            yield f"impl=megatron does not compute {name}={fields[name]} of the model's config; use another impl"


def _listed(names: Sequence[str]) -> str:
    return ",".join(names) or "none"
