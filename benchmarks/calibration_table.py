"""Writes overlap_sweep/predict/calibration.yaml from recordings of collectives with different numbers of thread blocks,
and prints as Markdown how well each of them is predicted from the others.

    python -m benchmarks.calibration_table        # 5 s
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.predictions_table import DATA, graph_of, unpacked
from overlap_sweep.predict.calibration import Calibration, RateSeen, SlowdownSeen, fitted
from overlap_sweep.predict.changes.blocks import kernels_of, with_blocks
from overlap_sweep.predict.graph import StepGraph
from overlap_sweep.predict.replay import recorded, replay, step_us

WRITTEN = Path(__file__).parent.parent / "overlap_sweep" / "predict" / "calibration.yaml"
RATES = {
    "causes/h200x2": ("manual_connections_32",),
    "causes/h200x2_reads_and_ctas": ("few_ctas", "fewer_ctas", "many_ctas"),
    "effects/h200x2": ("ddp_1", "ddp_max_ctas_4", "fsdp2_1", "fsdp2_max_ctas_4"),
}
SLOWDOWNS = {"causes/h200x2_reads_and_ctas": ("few_ctas", "fewer_ctas", "many_ctas")}
"""One program, whose GEMMs run alone and beside collectives."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = calibration(Path(folder))
        head = f"# Written by benchmarks/{Path(__file__).name} from the recordings below tests/data that it names.\n"
        WRITTEN.write_bytes(head.encode() + msgspec.yaml.encode([found]))
        print(*rates_table(found), "", *steps_table(Path(folder), found), sep="\n")


def calibration(folder: Path) -> Calibration:
    rates: dict[str, list[RateSeen]] = defaultdict(list)
    kinds = set()
    for name, graph in _graphs(folder, RATES):
        kinds.add((graph.device_name, graph.nccl_version, max(node.group_size or 0 for node in graph.nodes)))
        kernels = [one for one in kernels_of(graph) if one.gb_per_s is not None]
        for collective in sorted({one.family.collective for one in kernels}):
            same = [one for one in kernels if one.family.collective == collective]
            largest = max(one.node.bytes or 0 for one in same)
            own = [one for one in same if one.node.bytes == largest]
            (blocks,) = {one.blocks for one in own}
            rate = median(one.gb_per_s or 0.0 for one in own)
            rates[collective].append(RateSeen(blocks, round(rate, 1), round(largest / 1e6, 1), name))
    ((device, nccl, ranks),) = kinds
    return Calibration(device, ranks, nccl, dict(sorted(rates.items())), [*_slowdowns(folder)])


def _slowdowns(folder: Path) -> Iterator[SlowdownSeen]:
    for name, graph in _graphs(folder, SLOWDOWNS):
        (blocks,) = {one.blocks for one in kernels_of(graph)}
        gemms = [node for node in graph.nodes if node.is_gemm]
        lost_ns = sum(node.slowdown * node.duration_ns for node in gemms)
        yield SlowdownSeen(blocks, round(lost_ns / sum(node.duration_ns for node in gemms), 3), name)


def _graphs(folder: Path, recordings: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, StepGraph]]:
    for archive, names in recordings.items():
        for name in names:
            graph = graph_of(unpacked(folder, DATA / archive) / name)
            assert graph is not None
            yield f"{archive}/{name}", graph


def rates_table(found: Calibration) -> list[str]:
    lines = [
        "| collective | thread blocks | MB | GB/s | of all, GB/s | error | of the others, GB/s | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for collective, seen in found.rates.items():
        for one in sorted(seen, key=lambda one: (one.blocks, one.mb)):
            usual = fitted((other.blocks, other.gb_per_s) for other in seen).of(one.blocks)
            others = [(other.blocks, other.gb_per_s) for other in seen if other.blocks != one.blocks]
            start = f"| {collective} | {one.blocks} | {one.mb:g} | {one.gb_per_s:.0f} | {usual:.0f} |"
            start += f" {usual / one.gb_per_s - 1:+.0%} |"
            if len({blocks for blocks, _ in others}) > 1:
                apart = fitted(others).of(one.blocks)
                start += f" {apart:.0f} | {apart / one.gb_per_s - 1:+.0%} |"
            else:
                start += " | |"
            lines.append(start)
    return lines


def without(found: Calibration, names: Collection[str]) -> Calibration:
    """Returns the calibration without what these recordings have shown."""
    rates = {
        collective: [one for one in seen if Path(one.recording).name not in names]
        for collective, seen in found.rates.items()
    }
    slowdowns = [one for one in found.slowdowns if Path(one.recording).name not in names]
    return Calibration(found.device, found.ranks, found.nccl, rates, slowdowns)


def steps_table(folder: Path, found: Calibration) -> list[str]:
    """Returns how well the recorded steps are predicted from each other, with what the changed recording has shown, and
    without it."""
    lines = [
        "| recorded | change | measured, ms | predicted, ms | error | without the changed recording, ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    ((_, names),) = SLOWDOWNS.items()
    graphs = {Path(name).name: graph for name, graph in _graphs(folder, SLOWDOWNS)}
    for before in names:
        for after in names:
            if before != after:
                measured_us = step_us(graphs[after], recorded(graphs[after]))
                blocks = max(one.blocks for one in kernels_of(graphs[after]))
                told = [_step_us(graphs[before], blocks, one) for one in (found, without(found, [after]))]
                words = " | ".join(f"{one / 1000:.2f} | {one / measured_us - 1:+.1%}" for one in told)
                lines.append(f"| {before} | {blocks} blocks | {measured_us / 1000:.2f} | {words} |")
    return lines


def _step_us(graph: StepGraph, blocks: int, known: Calibration) -> float:
    changed = graph.copy()
    with_blocks(changed, most=lambda _: blocks, least=lambda _: blocks, known=[known])
    return step_us(changed, replay(changed))


if __name__ == "__main__":
    sys.exit(main())
