"""torch.compile of real layers; inductor's own compiling, which takes its time, is of the second step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.fsdp.config import Compile
from overlap_sweep.workloads.fsdp.ranking_model import compile_layers
from tests.processes import run_ranks

pytestmark = pytest.mark.end_to_end

ALONE = Ranks(0, 1, torch.device("cpu"))
COMPILE = Compile(enabled=True, backend="aot_eager")


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x)) + x


class Breaking(Layer):
    """Cannot be one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def layers(kind: type[Layer] = Layer, count: int = 12) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(8, 8) for _ in range(count)]


def example(layer: nn.Module) -> None:
    layer(torch.ones(2, 8)).sum().backward()
    layer.zero_grad()


def compiled(model: list[nn.Module], **changes: Any) -> str:
    return compile_layers(model, replace(COMPILE, **changes), example, ALONE)


def are_compiled(model: list[nn.Module]) -> set[bool]:
    return {layer._compiled_call_impl is not None for layer in model}


def assert_the_same(model: list[nn.Module], plain: list[nn.Module]) -> None:
    """Names of parameters, output, and the gradient of every parameter."""
    assert [list(layer.state_dict()) for layer in model] == [list(layer.state_dict()) for layer in plain]
    x, y = torch.ones(2, 8), torch.ones(2, 8)
    for layer, other in zip(model, plain, strict=True):
        x, y = layer(x), other(y)
    torch.testing.assert_close(x, y)
    (x.sum() + y.sum()).backward()
    for layer, other in zip(model, plain, strict=True):
        for parameter, expected in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize(
    ("backend", "count", "options"), [("aot_eager", 12, {"fullgraph": True}), ("inductor", 2, {"dynamic": False})]
)
def test_compiled_layers_compute_the_same_under_the_same_names(
    backend: str, count: int, options: dict[str, Any]
) -> None:
    model = layers(count=count)
    torch._dynamo.utils.counters.clear()
    assert compiled(model, backend=backend, **options) == backend
    assert are_compiled(model) == {True}
    assert_the_same(model, layers(count=count))
    # Alike layers share them: past torch's limit of recompilations layers would silently run as they are.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def broken(_graph: torch.fx.GraphModule, _inputs: Any) -> Any:
    raise MemoryError("no room for code\nnor for more")


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"backend": "inductr"}, Layer, "no: InvalidBackend: Invalid backend: 'inductr'"),
        ({"fullgraph": True}, Breaking, "no: Unsupported: "),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, Layer, "no: RuntimeError: Either mode or"),
        ({"backend": broken}, Layer, "no: MemoryError: no room for code"),
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
    assert are_compiled(model) == {False}
    assert_the_same(model, layers(kind))


def test_on_rocm_inductor_becomes_aot_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3.42131")
    assert compiled(layers(), backend="inductor", mode="max-autotune") == "aot_eager"
    assert "on ROCm aot_eager instead of inductor" in capsys.readouterr().out
    assert compiled(layers(), backend="eager") == "eager"


def _on_one_rank_only(ranks: Ranks, failing: int | None) -> tuple[str, set[bool]]:
    def fails(layer: nn.Module) -> None:
        if ranks.rank == failing:
            raise ValueError(f"on rank {ranks.rank}")
        example(layer)

    model = layers(count=2)
    return compile_layers(model, COMPILE, fails, ranks), are_compiled(model)


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_failure_on_one_rank_is_one_of_all(failing: int | None) -> None:
    found = run_ranks(2, _on_one_rank_only, failing, keep="cpu")
    reasons = dict.fromkeys(range(2), "no: it failed on another rank; see that rank's log")
    reasons |= {failing: f"no: ValueError: on rank {failing}"}
    assert found == [("aot_eager", {True}) if failing is None else (reasons[rank], {False}) for rank in range(2)]
