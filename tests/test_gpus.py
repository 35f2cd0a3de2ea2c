"""How many ranks a point has whose options leave it open."""

from collections.abc import Iterator

import pytest

from overlap_sweep import gpus
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import visible_gpus
from overlap_sweep.runtime import point
from tests.composed import composed

LAYER, STACK, FSDP = "workload=layer", "workload=tp_training", "workload=fsdp"
MOE = ("layer=moe", "model=qwen3_moe_tiny")


@pytest.fixture
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(point, "visible_gpus", visible_gpus)
    visible_gpus.cache_clear()
    yield
    monkeypatch.undo()
    visible_gpus.cache_clear()


@pytest.mark.usefixtures("_eight_gpus")
@pytest.mark.parametrize(
    ("given", "tp_size", "ranks"),
    [
        ((LAYER,), 8, 8),
        ((LAYER, "layer.num_replicas=2"), 4, 8),
        ((LAYER, *MOE), 1, 2),
        ((LAYER, *MOE, "tp_size=null"), 1, 2),
        ((LAYER, "runtime.device=cpu"), 2, 2),
        ((LAYER, "runtime.device=cpu", "layer.num_replicas=2"), 2, 4),
        ((STACK,), 8, 8),
        ((STACK, "dp_size=4"), 2, 8),
        ((STACK, "tp_size=null", "ranks=4"), 4, 4),
        ((STACK, "tp_size=2"), 2, 2),
        ((STACK, "runtime.device=cpu", "dp_size=2"), 2, 4),
        ((FSDP,), 1, 8),
        ((FSDP, "distributed.dp_size=2"), 1, 2),
        ((FSDP, "runtime.device=cpu"), 1, 2),
        (("workload=operator",), 2, 2),
        (("workload=operator", "tp_size=null"), 8, 8),
    ],
)
def test_all_gpus_are_used_unless_a_number_is_given(given: tuple[str, ...], tp_size: int, ranks: int) -> None:
    found = composed(*given)
    assert (found["tp_size"], found.world_size) == (tp_size, ranks)


@pytest.mark.usefixtures("_eight_gpus")
def test_what_cannot_be_decided_is_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^tp_size=null: 8 GPUs are not divisible by 3 data-parallel ranks; give tp_"):
        composed(STACK, "dp_size=3")
    monkeypatch.setattr(gpus, "_elsewhere", True)
    with pytest.raises(UserError, match=r"^tp_size=null means all GPUs of the nodes, whose number only Slurm knows;"):
        composed(LAYER)
