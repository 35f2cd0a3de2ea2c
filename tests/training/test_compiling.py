"""torch.compile of real layers; inductor's own compiling, which takes its time, is of the second step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from overlap_sweep.ranks import Ranks
from overlap_sweep.training.compiling import compile_layers
from tests.processes import run_ranks

pytestmark = pytest.mark.end_to_end

ALONE = Ranks(0, 1, torch.device("cpu"))
COMPILE: dict[str, Any] = {
    **{"enabled": True, "backend": "aot_eager", "mode": None, "fullgraph": False, "dynamic": None, "options": {}},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + x


class Breaking(Layer):
    """Cannot be one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("", end="")
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch._dynamo.reset()


def layers(kind: type[Layer] = Layer, count: int = 12) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def example(layer: nn.Module) -> None:
    layer(torch.ones(2, 8)).sum().backward()
    layer.zero_grad()


def result(model: list[nn.Module]) -> list[torch.Tensor]:
    """The output, and the gradient of every parameter."""
    x = torch.ones(2, 8)
    for layer in model:
        x = layer(x)
    x.sum().backward()
    return [x.detach(), *(parameter.grad for layer in model for parameter in layer.parameters())]


def compiled(model: list[nn.Module], ranks: Ranks = ALONE, **changes: Any) -> str:
    return compile_layers(model, COMPILE | changes, example, ranks)


def is_plain(model: list[nn.Module]) -> bool:
    return all(layer._compiled_call_impl is None for layer in model)


def assert_the_same(model: list[nn.Module], plain: list[nn.Module]) -> None:
    for ours, theirs in zip(result(model), result(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("backend", "count", "options"),
    [("eager", 12, {"fullgraph": True}), ("aot_eager", 12, {"fullgraph": True}), ("inductor", 2, {"dynamic": False})],
)
def test_compiled_layers_compute_the_same_under_the_same_names(
    backend: str, count: int, options: dict[str, Any]
) -> None:
    plain, model = layers(count=count), layers(count=count)
    assert compiled(model, backend=backend, **options) == backend
    assert not any(layer._compiled_call_impl is None for layer in model)
    assert [list(layer.state_dict()) for layer in model] == [list(layer.state_dict()) for layer in plain]
    assert_the_same(model, plain)


def test_alike_layers_share_one_graph() -> None:
    """Past torch's limit of recompilations layers would silently run as they are."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = layers()
    assert compile_layers(model, COMPILE | {"backend": counting}, example, ALONE) == str(counting)
    result(model)
    assert len(graphs) <= 2


def test_nothing_is_compiled_unless_asked_for() -> None:
    model = layers()
    assert compiled(model, enabled=False) == "no"
    assert is_plain(model)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"backend": "inductr"}, Layer, "no: InvalidBackend: Invalid backend: 'inductr'"),
        ({"fullgraph": True}, Breaking, "no: Unsupported: "),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, Layer, "no: RuntimeError: Either mode or"),
    ],
)
def test_where_it_fails_the_layers_stay_and_the_reason_is_told(
    changes: dict[str, Any], kind: type[Layer], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = layers(kind)
    told = compiled(model, **changes)
    assert told.startswith(reason)
    assert "\n" not in told
    assert told.removeprefix("no: ") in capsys.readouterr().out
    assert is_plain(model)
    assert_the_same(model, layers(kind))


def test_what_a_backend_raises_is_the_reason() -> None:
    def broken(_graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise MemoryError("no room for code\nnor for more")

    assert compiled(layers(), backend=broken) == "no: MemoryError: no room for code"


def test_on_rocm_inductor_becomes_aot_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    assert compiled(layers(), backend="inductor", mode="max-autotune") == "aot_eager"
    assert "on ROCm aot_eager instead of inductor" in capsys.readouterr().out
    assert compiled(layers(), backend="eager") == "eager"


def _on_one_rank_only(ranks: Ranks, failing: int | None) -> tuple[str, bool]:
    def fails(layer: nn.Module) -> None:
        if ranks.rank == failing:
            raise ValueError(f"on rank {ranks.rank}")
        example(layer)

    model = layers(count=2)
    return compile_layers(model, COMPILE, fails, ranks), is_plain(model)


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_failure_on_one_rank_is_one_of_all(failing: int | None) -> None:
    told = ("aot_eager", False) if failing is None else (f"no: ValueError: on rank {failing}", True)
    assert run_ranks(2, _on_one_rank_only, failing, keep="cpu") == [told] * 2
