"""The answer card of a layer: the variant to use, its gain, and Megatron-LM's arguments for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.overlap.overlap_cfg import NONE, OverlapConfig, megatron_arguments
from overlap_sweep.report.numbers import as_percent, as_sentence
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.run_directory import settings_file

if TYPE_CHECKING:
    from overlap_sweep.workloads.layer.section import LayerAnalysis

MEGATRON_BACKENDS = ("transformer_engine", "megatron")
<<<<<<< HEAD
"""Backends whose variants Megatron-LM can run."""
FILE_NAME = "tp_comm_overlap_cfg.yaml"
"""Name under which the reader saves the slots."""


def card(layer: LayerAnalysis, title: str) -> Card:
    """Returns the answer card."""
    best, rounds = layer.winner, f"{layer.rounds} interleaved rounds, {CONFIDENCE:.0%} confidence intervals"
=======
"""Whose variants Megatron-LM can be given."""


def card(layer: LayerAnalysis, title: str, root: Path) -> Card:
    """Returns what to do, at a glance; its file is relative to the analysed directory."""
    best, rounds = layer.winner, f"{layer.rounds} rounds side by side, intervals of {CONFIDENCE:.0%}"
>>>>>>> 3548fa1 (A layer's card names the file that its run directory has, instead of showing its content)
    if best is None:
        keep = "Keep overlap off" if layer.reference == NONE else f"Keep {layer.spoken_reference}"
        return Card(
            title,
            keep if layer.contenders else "No verdict",
            [f"{as_sentence(layer.verdict)}.", f"Measured in {rounds}."],
        )
    hidden = f"It hides {as_percent(best.hidden_fraction)} of the communication. " if best.hidden_fraction > 0 else ""
<<<<<<< HEAD
    gain = best.to_reference.in_words(f" than {layer.spoken_reference}")
    return Card(title, f"Use {best.label}: {gain}", [f"{hidden}Measured in {rounds}."], use=_use(layer))


def _use(layer: LayerAnalysis) -> list[str]:
    """Returns Megatron-LM's arguments to train with the fastest variant; empty if nothing beats the reference or
    Megatron-LM cannot run it."""
=======
    gain = best.to_reference.in_words(f" than {layer.reference}")
    arguments, file = _for_megatron(layer, root)
    return Card(title, f"Use {best.label}: {gain}", [f"{hidden}Measured in {rounds}."], file=file, use=arguments)


def _for_megatron(layer: LayerAnalysis, root: Path) -> tuple[list[str], str]:
    """Returns the arguments of Megatron-LM that train with the fastest, and the file with its slots; empty if that is
    the reference, or nothing that Megatron-LM has."""
>>>>>>> 3548fa1 (A layer's card names the file that its run directory has, instead of showing its content)
    winner, config = layer.winner, layer.point.config
    if winner is None or config["backend"] not in MEGATRON_BACKENDS or not winner.measured.switches:
        return [], ""
    slots = winner.measured.settings
<<<<<<< HEAD
    is_file = winner.name.startswith(FILE)
    file = Path(winner.name.removeprefix(FILE)).name if is_file else FILE_NAME
    lines = megatron_arguments(OverlapConfig(slots, winner.measured.switches), config["tp_size"], file if slots else "")
    written = yaml.safe_dump(slots, sort_keys=False).splitlines() if slots and not is_file else []
    return [*lines, *([f"# {file}:"] if written else []), *written]
=======
    file = layer.point.directory.relative_to(root) / settings_file(winner.name) if slots else ""
    overlap = OverlapConfig(slots, winner.measured.switches)
    return megatron_arguments(overlap, config["tp_size"], str(file)), str(file)
>>>>>>> 3548fa1 (A layer's card names the file that its run directory has, instead of showing its content)
