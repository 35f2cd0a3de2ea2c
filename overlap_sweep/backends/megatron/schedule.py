"""Runs micro batches through a layer: one after the other, or as `overlap_moe_expert_parallel_comm` does, where the
backward of one is taken apart and interleaved with the forward of the next, so that each computes while tokens of the
other move."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comm_stream, get_comp_stream, set_streams
from torch import Tensor

from overlap_sweep.backends.megatron.layer import Layer, Routing

_ROTARY = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
_WITHOUT = ("attention_mask", *_ROTARY, "packed_seq_params", "sequence_len_offset")
"""Attributes that a model would give to its layers, all None here."""


@dataclass(frozen=True)
class MicroBatch:
    x: Tensor
    """[sequence, batch, hidden], a leaf that gets its gradient."""
    gradient: Tensor
    """Gradient of the output."""
    routing: Routing


class Sequential:
    """A micro batch after the other."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def first(self, begun: MicroBatch) -> Tensor:
        """Runs the forward, and returns the output."""
        with self._layer.running():
            self._layer.route(begun.routing)
            return self._layer.forward(begun.x)

    def both(self, output: Tensor, ended: MicroBatch, begun: MicroBatch) -> Tensor:
        """Runs the backward of the micro batch that had this output and the forward of the next, and returns that
        one's output."""
        self.last(output, ended)
        return self.first(begun)

    def last(self, output: Tensor, ended: MicroBatch) -> None:
        """Runs the backward."""
        with self._layer.running():
            torch.autograd.backward(output, ended.gradient)


class Interleaved(Sequential):
    """One micro batch's forward with the backward of the one before, as Megatron-Core schedules a layer of each."""

    _plan: TransformerLayerSchedulePlan

    def first(self, begun: MicroBatch) -> Tensor:
        return self._run(begun, None)

    def both(self, output: Tensor, ended: MicroBatch, begun: MicroBatch) -> Tensor:
        return self._run(begun, ended)

    def last(self, output: Tensor, ended: MicroBatch) -> None:
        self._run(None, ended)

    def _run(self, begun: MicroBatch | None, ended: MicroBatch | None) -> Any:
        with self._layer.running():
            forward = backward = None
            if ended is not None:
                backward = self._plan
                backward.event.record(torch.cuda.current_stream())
            if begun is not None:
                self._layer.route(begun.routing)
                self._plan = forward = self._new_plan()
                forward.event.record(torch.cuda.current_stream())
            output, gradient = TransformerLayerSchedulePlan.run(
                forward,
                backward,
                f_input=begun.x if begun else None,
                b_grad=ended.gradient if ended else None,
                is_last_layer_in_bwd=True,
            )
            output, gradient = _finished(output), _finished(gradient)
            for plan in filter(None, (forward, backward)):
                plan.event.wait(torch.cuda.current_stream())
            if ended is not None and backward is not None:
                ended.x.grad = gradient
                backward.release_state()
            return output

    def _new_plan(self) -> TransformerLayerSchedulePlan:
        # Makes the stream of communication once for the process.
        set_streams()
        streams: tuple[object, object] = get_comp_stream, get_comm_stream
        if "comp_stream" in signature(set_streams).parameters:
            # 0.16 takes the streams, later versions these functions.
            streams = get_comp_stream(), get_comm_stream()
        state = SimpleNamespace(
            **dict.fromkeys(_WITHOUT), model=SimpleNamespace(decoder=SimpleNamespace(final_layernorm=None))
        )
        ends = {"is_first_layer": True, "is_last_layer": True}
        plan = TransformerLayerSchedulePlan(self._layer.module, torch.cuda.Event(), state, *streams, ends)
        if not self._layer.on_gpu:
            for name, node in list(vars(plan).items()):
                if isinstance(node, ScheduleNode):
                    setattr(plan, name, _Node(node, in_thread=name.startswith("moe_")))
        return plan


class _Node:
    """A node of a plan on a CPU: what communicates runs in a thread, as on a GPU in a stream of its own, and what needs
    its result waits for it."""

    def __init__(self, node: Any, *, in_thread: bool) -> None:
        self._node, self._in_thread = node, in_thread

    def forward(self, inputs: Any) -> Any:
        return self._run(self._node.forward, inputs)

    def backward(self, gradients: Any) -> Any:
        return self._run(self._node.backward, gradients)

    def backward_dw(self) -> None:
        self._node.backward_dw()

    def _run(self, run: Callable[[Any], Any], value: Any) -> Any:
        return _thread().submit(lambda: run(_finished(value))) if self._in_thread else run(_finished(value))


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="communication")


def _finished(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else value
