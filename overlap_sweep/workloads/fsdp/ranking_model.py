"""A ranking model, which predicts the logit of a click from embedded features and a user's history with a transformer.
Its units mark when they compute, and its layers can be compiled."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from overlap_sweep.config import ResolvedModel, known
from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.fsdp.collectives import Recorder
from overlap_sweep.workloads.fsdp.config import Compile, ResolvedRanking

EPSILON = 1e-5
INIT_STD = 0.02
NOT_COMPILED = "no"
LONGEST_REASON = 200
"""Longest recorded reason, in characters: inductor lists all of its options in one line."""


class Batch(NamedTuple):
    sparse: Tensor
    """[batch, num_sparse_features], rows of the tables."""
    history: Tensor
    """[batch, sequence_length], rows of the items' table."""
    dense: Tensor
    """[batch, num_dense_features]."""
    clicked: Tensor
    """[batch], 0 or 1."""


class Features(nn.Module):
    """Embeds the features of each sample as tokens: [batch, 1 + num_sparse + sequence_length, hidden]."""

    def __init__(self, ranking: ResolvedRanking, hidden: int) -> None:
        super().__init__()
        sparse, rows = ranking.num_sparse_features, ranking.vocab_size
        self.tables = nn.Embedding(sparse * rows, hidden)
        self.items = nn.Embedding(rows, hidden)
        self.dense = nn.Linear(ranking.num_dense_features, hidden)
        self.positions = nn.Parameter(torch.empty(1 + sparse + ranking.sequence_length, hidden))
        self._rows = rows
        self._ids: tuple[Tensor, Tensor] | None = None

    def give(self, batch: Batch) -> Tensor:
        """Keeps the batch's rows for the next forward; returns the forward's input, the dense features.

        A unit has one input, which requires a gradient: the mark at the end of its backward depends on it.
        """
        tables = torch.arange(batch.sparse.shape[1], device=batch.sparse.device) * self._rows
        self._ids = batch.sparse + tables, batch.history
        return batch.dense.detach().requires_grad_()

    def forward(self, dense: Tensor) -> Tensor:
        assert self._ids is not None
        sparse, history = self._ids
        tokens = [self.dense(dense).unsqueeze(1), self.tables(sparse), self.items(history)]
        return torch.cat(tokens, dim=1) + self.positions


class TransformerLayer(nn.Module):
    """Bidirectional attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__()
        hidden, ffn, bias = known(model.hidden_size), known(model.ffn_hidden_size), bool(model.bias)
        self.heads, self.kv_heads = known(model.num_attention_heads), known(model.num_kv_heads)
        self.head_dim, self.gated = known(model.head_dim), model.gated_mlp
        self.attention_norm, self.mlp_norm = _norm(model), _norm(model)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.proj = nn.Linear(self.heads * self.head_dim, hidden, bias=bias)
        self.fc1 = nn.Linear(hidden, ffn * (2 if self.gated else 1), bias=bias)
        self.fc2 = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attend(self.qkv(self.attention_norm(x))))
        return x + self.fc2(self._activate(self.fc1(self.mlp_norm(x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, tokens, _ = qkv.shape
        counts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.view(batch, tokens, sum(counts), self.head_dim).transpose(1, 2).split(counts, dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.kv_heads)
        return attended.transpose(1, 2).reshape(batch, tokens, -1)

    def _activate(self, x: Tensor) -> Tensor:
        if not self.gated:
            return functional.gelu(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Head(nn.Module):
    """Computes the logit of a click from the token of the dense features: [batch, 1]."""

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.score = nn.Linear(known(model.hidden_size), 1)

    def forward(self, x: Tensor) -> Tensor:
        logit: Tensor = self.score(self.norm(x[:, 0]))
        return logit


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward, backward) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.backward_call = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        ctx.backward_call()
        return gradient, None, None


class Unit(nn.Module):
    """A part of the model that is sharded and gathered as a whole. Marks the begin and end of its computation, forward
    and backward: after its parameters are gathered, and before its gradients are reduced.

    FSDP2's hooks are on this module and therefore outside of the marks, which are in its forward.
    """

    def __init__(self, body: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        self.body = body
        self._recorder = recorder
        self.forward_ended: Callable[[], object] = lambda: None
        self.backward_ended: Callable[[], object] = lambda: None
        """Called on the host when the end of the computation is enqueued."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(_Entry.apply(x, self._recorder.begin_computing, self._end_backward))
        self._recorder.end_computing()
        self.forward_ended()
        assert output.grad_fn is not None
        # It runs after the tensor's hooks, among them FSDP2's, which waits for the parameters.
        output.grad_fn.register_prehook(self._begin_backward)
        return output

    def _begin_backward(self, _gradients: tuple[Tensor, ...]) -> None:
        self._recorder.begin_computing()

    def _end_backward(self) -> None:
        self._recorder.end_computing()
        self.backward_ended()


class RankingModel(nn.Module):
    """The ranking model's units, in order: features, layers, head."""

    def __init__(self, model: ResolvedModel, ranking: ResolvedRanking, recorder: Recorder) -> None:
        super().__init__()
        self.features = Unit(Features(ranking, known(model.hidden_size)), recorder)
        self.layers = nn.ModuleList(Unit(TransformerLayer(model), recorder) for _ in range(ranking.num_layers))
        self.head = Unit(Head(model), recorder)

    @property
    def units(self) -> list[Unit]:
        return [self.features, *self.layers, self.head]

    def forward(self, batch: Batch) -> Tensor:
        x = self.features(self.features.body.give(batch))  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x)
        return functional.binary_cross_entropy_with_logits(self.head(x).squeeze(-1).float(), batch.clicked)


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Initialises weights from a normal distribution, norms to one, biases to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=INIT_STD, generator=generator)


def _norm(model: ResolvedModel) -> nn.Module:
    norm = nn.RMSNorm if model.normalization == "RMSNorm" else nn.LayerNorm
    return norm(model.hidden_size, eps=EPSILON)


def compile_layers(
    layers: Sequence[nn.Module], config: Compile, example: Callable[[nn.Module], None], ranks: Ranks
) -> str:
    """Compiles every layer in place with the options of `config` (`config.Compile`). Returns the backend's name, `no`,
    or `no: ` and the reason, which is also printed. Collective.

    `example(layer)` runs one forward and backward. It is tried on the first layer, whose code all others share: if it
    raises on any rank, all ranks keep their layers uncompiled. Called before sharding, since a layer that fails inside
    of FSDP2's hooks leaves its parameters gathered. By `nn.Module.compile`, which keeps the parameters' names.
    """
    if not config.enabled:
        return NOT_COMPILED
    # Code compiled for earlier points of the process would affect whether and what is compiled now.
    torch._dynamo.reset()
    options = _options(config)
    try:
        layers[0].compile(**options)
        example(layers[0])
        reason = ""
    except Exception as error:
        reason = _reason(error)
    (failed,) = ranks.slowest([float(bool(reason))])
    if failed:
        reason = reason or "it failed on another rank; see that rank's log"
        # Undoes `compile`, for which torch has no function.
        layers[0]._compiled_call_impl = None
        print(f"torch.compile failed, so the layers run uncompiled: {reason}", flush=True)
        return f"{NOT_COMPILED}: {reason}"
    for layer in layers[1:]:
        layer.compile(**options)
    return str(options["backend"])


def _options(config: Compile) -> dict[str, Any]:
    options = {name: getattr(config, name) for name in ("backend", "fullgraph", "dynamic")}
    if torch.version.hip and config.backend == "inductor":
        print("torch.compile: on ROCm aot_eager instead of inductor, without its mode and options", flush=True)
        return {**options, "backend": "aot_eager"}
    return {**options, "mode": config.mode, "options": dict(config.options) or None}


def _reason(error: Exception) -> str:
    """Returns `<type>: <first line>` of the backend's error, rather than dynamo's."""
    cause = getattr(error, "inner_exception", error)
    line = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {line[:LONGEST_REASON]}{'...' if len(line) > LONGEST_REASON else ''}"
