"""The variants of a layer with experts: each is a module of its own with the same weights, inputs and routing, through
which an iteration's micro batches run."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from overlap_sweep.backends import installed
from overlap_sweep.backends.megatron.layer import Layer, draw_routing
from overlap_sweep.backends.megatron.schedule import Interleaved, MicroBatch, Sequential
from overlap_sweep.config import known
from overlap_sweep.errors import Refused
from overlap_sweep.measure import DTYPES, Ranks, stream
from overlap_sweep.measure.instruments import say_loss
from overlap_sweep.measure.timing import Variant
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE
from overlap_sweep.workloads.layer import moe
from overlap_sweep.workloads.layer.config import Resolved
from overlap_sweep.workloads.layer.moe import VARIANTS, overlaps_micro_batches
from overlap_sweep.workloads.layer.run import INPUTS, Bench, Configured, draw, measured


def run(point: Resolved, directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns the measured fields of the point's `Result`. Collective."""
    return measured(_bench(point, ranks), point, directory, ranks)


def _bench(point: Resolved, ranks: Ranks) -> Bench:
    """Returns the point's variants. Collective."""
    options, refused = point.layer.moe, moe.refused_variants(point)
    assert options.micro_batches
    asked, parts = options.arguments, range(options.micro_batches)
    inputs = [[_micro_batch(point, number, part, ranks) for part in parts] for number in range(INPUTS)]
    variants = {}
    for name in dict.fromkeys([NONE, *moe.names(point)]):
        given = asked.get(name, VARIANTS[NONE])
        num_sm = None if name in (NONE, FLOOR) else options.num_sm
        try:
            layer = Layer(point, given, ranks, num_sm, silent=name == FLOOR)
        except Refused as reason:
            if name not in asked or name == NONE:
                raise
            refused[name] = str(reason)
            continue
        run = Interleaved(layer) if overlaps_micro_batches(given) else Sequential(layer)
        variants[name] = _variant(run, inputs, dict(layer.module.named_parameters()))
    configured = {name: Configured(arguments=asked[name]) for name in variants if name in asked and name != NONE}
    return Bench(variants, configured, refused, NONE in asked, partial(_attention, ranks))


def _attention(ranks: Ranks) -> tuple[str | None, list[str]]:
    if ranks.device.type == "cpu":
        # On a CPU there is no faster one that training would use.
        return "torch", []
    backend = installed.attention_backend()
    return backend, installed.attention_warnings(backend)


def _micro_batch(point: Resolved, number: int, part: int, ranks: Ranks) -> MicroBatch:
    model, batch, routing = point.model, point.layer.micro_batch_size, point.layer.moe.routing
    assert routing
    tokens = point.workload.tokens // point.tp_size
    seed, name = point.workload.seed, f"{number} of micro batch {part}"
    generator = stream(ranks.device, seed, f"input {name}", ranks.rank)
    shape = tokens // batch, batch, known(model.hidden_size)
    x, gradient = (draw(shape, generator, DTYPES[point.precision]) for _ in range(2))
    experts = known(model.num_experts), known(model.experts_per_token)
    routed = draw_routing(routing, tokens, *experts, name, seed, ranks)
    return MicroBatch(x.requires_grad_(), gradient, routed)


def _variant(run: Sequential, inputs: Sequence[Sequence[MicroBatch]], parameters: Mapping[str, Tensor]) -> Variant:
    def forward(repeat: int) -> Tensor:
        parts = inputs[repeat % INPUTS]
        for tensor in (*(part.x for part in parts), *parameters.values()):
            tensor.grad = None
        return run.first(parts[0])

    def both(repeat: int, output: Tensor) -> Tensor:
        parts = inputs[repeat % INPUTS]
        for ended, begun in pairwise(parts):
            output = run.both(output, ended, begun)
        return output

    def backward(repeat: int, output: Tensor) -> dict[str, Tensor]:
        parts = inputs[repeat % INPUTS]
        say_loss(output, parts[-1].gradient)
        run.last(output, parts[-1])
        found = {f"input {number}": part.x.grad for number, part in enumerate(parts)}
        found |= {name: parameter.grad for name, parameter in parameters.items()}
        return {f"{name}_grad": gradient for name, gradient in found.items() if gradient is not None}

    return Variant(forward, backward, both=both if len(inputs[0]) > 1 else None, waits=True)
