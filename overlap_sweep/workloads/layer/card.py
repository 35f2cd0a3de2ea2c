"""The answer card of a layer: the variant to use, its gain, and Megatron-LM's arguments for it."""

from __future__ import annotations

from pathlib import Path

from overlap_sweep.overlap.expert_parallel import megatron_arguments as megatron_moe_arguments
from overlap_sweep.overlap.overlap_cfg import FILE, NONE, OverlapConfig, megatron_arguments, set_in_training
from overlap_sweep.report.numbers import as_percent, as_sentence
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.gain import nothing_beat
from overlap_sweep.results.provenance import cpu_only
from overlap_sweep.results.run_directory import settings_file
from overlap_sweep.workloads.layer.answer import LayerAnalysis, of_moe
from overlap_sweep.workloads.layer.config import Resolved

MEGATRON_BACKENDS = ("transformer_engine", "megatron")
"""Backends whose variants Megatron-LM can run."""


def card(layer: LayerAnalysis, title: str, root: Path) -> Card:
    """Returns the answer card; its file is relative to the analysed directory."""
    best, rounds = layer.winner, f"{layer.rounds} interleaved rounds, {CONFIDENCE:.0%} confidence intervals"
    if best is None:
        keep = "keep overlap off" if layer.reference == NONE else f"keep {layer.spoken_reference}"
        return Card(
            title,
            nothing_beat(layer.spoken_reference, keep) if layer.contenders else "No verdict",
            [f"{as_sentence(layer.verdict)}.", f"Measured in {rounds}."],
        )
    hidden = f"It hides {as_percent(best.hidden_fraction)} of the communication. " if best.hidden_fraction > 0 else ""
    gain = best.to_reference.gain.in_words(layer.spoken_reference)
    limits = cpu_only([layer.point])
    sentences = [f"{hidden}Measured in {rounds}.", *set_in_training(layer.point.case.process_wide)]
    winner, config = best.measured, layer.point.config_as(Resolved)
    if winner.arguments:
        moe = of_moe(config)
        assert moe
        assert moe.ep_size
        use = megatron_moe_arguments(winner.arguments, moe.ep_size)
        return Card(title, f"Use {best.label}: {gain}", sentences, use=use, limits=limits)
    if config.backend not in MEGATRON_BACKENDS or not winner.switches:
        return Card(title, f"Use {best.label}: {gain}", sentences)
    given = best.name.removeprefix(FILE) if best.name.startswith(FILE) else ""
    written = (layer.point.directory.relative_to(root) / settings_file(best.name)).as_posix()
    overlap, file = OverlapConfig(winner.settings, winner.switches), (given or written) if winner.settings else ""
    return Card(
        title,
        f"Use {best.label}: {gain}",
        sentences,
        file="" if given else file,
        use=megatron_arguments(overlap, config.tp_size, file),
        limits=limits,
    )
