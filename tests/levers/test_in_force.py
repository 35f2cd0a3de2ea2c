"""Levers in trainings on a CPU: applied by all ranks, seen in what ran, and equal to the lines that one would write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent

import pytest

from overlap_sweep.levers import Value, levers
from overlap_sweep.predict.runs import predictions_of
from tests.levers.runs import TRAINING, Ran, run
from tests.recorder.trainings import recording

DDP: dict[str, Value] = {
    "ddp.bucket_cap_mb": 2,
    "ddp.first_bucket_mb": 0.5,
    "ddp.gradient_as_bucket_view": True,
    "ddp.no_sync": True,
    "loader.num_workers": 1,
    "loader.prefetch_factor": 4,
    "loader.persistent_workers": True,
    "optimizer.fused": True,
    "host.collect_every": 2,
}
FSDP2: dict[str, Value] = {
    "fsdp2.prefetch": 2,
    "fsdp2.reshard_after_forward": False,
    "fsdp2.separate_reduce_scatter_group": True,
    "fsdp2.no_sync": True,
}
CALLS = {
    "ddp": "DistributedDataParallel(model)",
    "loader": "DataLoader(dataset, batch_size=BATCH)",
    "optimizer": "AdamW(parameters)",
}
"""Calls of the script whose arguments levers change, by family."""
BEFORE, AFTER = "# BEFORE THE FIRST STEP", "    # AFTER EACH STEP"
LOOP = "    for batch in microbatches:\n        loss(model(batch)).backward()\n"
UNIT = "fully_shard(unit)"


def with_lines(script: str, values: Mapping[str, Value]) -> str:
    """Returns the script with what levers.yaml says to write in the place of what it has."""
    arguments: dict[str, list[str]] = {}
    for name, value in values.items():
        # As its comment says.
        lines = levers()[name].written(value).replace(", 25]", f", {values.get('ddp.bucket_cap_mb', 25)}]")
        family = name.partition(".")[0]
        if name.endswith("no_sync"):
            script = script.replace(LOOP, indent(lines, "    ") + "\n")
        elif name == "fsdp2.reshard_after_forward":
            script = script.replace(UNIT, lines.partition("  #")[0])
        elif name == "host.collect_every":
            script = script.replace(AFTER, f"{AFTER}\n{indent(lines, '    ')}")
        elif levers()[name].constructor:
            call = re.search(r"\w+\(\w+, (.*)\)", lines)
            assert call
            arguments.setdefault(family, []).extend(call[1].split(", ") if "[" not in call[1] else [call[1]])
        else:
            script = script.replace(BEFORE, f"{BEFORE}\n{lines}")
    for family, given in arguments.items():
        call = CALLS[family]
        script = script.replace(call, f"{call[:-1]}, {', '.join(dict.fromkeys(given))})")
    return script


def norm(ran: Ran) -> list[str]:
    return re.findall(r"norm (.*)", ran.output)


@pytest.mark.end_to_end
@pytest.mark.parametrize(("kind", "values"), [("ddp", DDP), ("fsdp2", FSDP2)])
def test_levers_are_in_force_and_so_are_their_lines(kind: str, values: dict[str, Value], tmp_path: Path) -> None:
    script = TRAINING.read_text()
    plain = run(tmp_path / "plain", script, kind)
    by_lever = run(tmp_path / "lever", script, kind, levers=values)
    by_hand = run(tmp_path / "lines", with_lines(script, values), kind)

    assert (by_lever.applied, by_lever.skipped) == ({*values}, {})
    assert by_lever.differences(by_hand) == []
    changed = {one.aspect for one in by_lever.differences(plain)}
    assert changed >= {"calls", "computation", "copies"}
    # The same training, on all ranks.
    (first, *others) = map(float, norm(by_lever))
    assert others == pytest.approx([first], rel=1e-6)
    assert [*map(float, norm(by_hand) + norm(plain))] == pytest.approx([first] * 4, rel=1e-4)


TWO_OPTIMIZERS = {
    "optimizer = AdamW(parameters)": "all = [*parameters]\noptimizer, second = AdamW(all[::2]), AdamW(all[1::2])",
    "    optimizer.step()": "    optimizer.step()\n    second.step()",
}


@pytest.mark.parametrize(
    "lines", [TWO_OPTIMIZERS, {"    optimizer.step()": "    optimizer.step()\n    overlap_sweep.step()"}]
)
def test_a_step_that_ends_twice_is_one(lines: dict[str, str], tmp_path: Path) -> None:
    script = "import overlap_sweep\n" + TRAINING.read_text().partition('"""\n\n')[2]
    for line, instead in lines.items():
        script = script.replace(line, instead)
    ran = run(tmp_path / "run", script, "ddp", levers={"ddp.no_sync": True}, ranks=1)

    assert (ran.applied, ran.skipped) == ({"ddp.no_sync"}, {})


@pytest.mark.end_to_end
def test_what_was_computed_again_is_kept_and_computes_the_same(tmp_path: Path) -> None:
    script = """
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
torch.manual_seed(0)
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
model = torch.nn.Sequential(*map(checkpoint_wrapper, blocks))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(13):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""
    run(tmp_path / "plain", script, ranks=1)
    kept = run(tmp_path / "kept", script, levers={"activations.recompute": False}, ranks=1)

    assert (kept.applied, kept.skipped) == ({"activations.recompute"}, {})
    assert recording(tmp_path / "kept").state == recording(tmp_path / "plain").state
    (change,) = predictions_of([*(tmp_path / "plain").glob("trace_rank*")], ["activations.recompute=false"])
    assert change.status == "predicted"
    (change,) = predictions_of([*(tmp_path / "kept").glob("trace_rank*")], ["activations.recompute=false"])
    assert change.reason == "The backward pass computes nothing again."


@pytest.mark.end_to_end
def test_blocks_are_compiled(tmp_path: Path) -> None:
    values: dict[str, Value] = {"host.compile_blocks": True}
    script = TRAINING.read_text()
    plain = run(tmp_path / "plain", script, "fsdp2", ranks=1)
    by_lever = run(tmp_path / "lever", script, "fsdp2", levers=values, ranks=1)
    by_hand = run(tmp_path / "lines", with_lines(script, values), "fsdp2", ranks=1)

    assert (by_lever.applied, by_lever.skipped) == ({*values}, {})
    assert by_lever.differences(by_hand) == []
    assert "computation" in {one.aspect for one in by_lever.differences(plain)}
