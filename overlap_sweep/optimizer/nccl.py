"""`hydra/sweeper=nccl`: what NCCL should use in a training, proven in its steps.

In the user's own (`workload=job`) each process group has its options, as `optimize` tries levers. Our own trainings,
whose process groups their libraries make, get NCCL's variables, which are for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep import workloads
from overlap_sweep.config import Search
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.levers import named
from overlap_sweep.levers.training import Training
from overlap_sweep.optimizer.candidates import Candidate, Recorded, candidates
from overlap_sweep.optimizer.groups import shares_by_collective
from overlap_sweep.optimizer.knobs import knobs_of, prior_of
from overlap_sweep.optimizer.nccl_files import FAMILIES
from overlap_sweep.optimizer.workflow import optimize
from overlap_sweep.report.numbers import counted
from overlap_sweep.report.searches import knob_lines
from overlap_sweep.results.run_directory import is_trace_of
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.progress import announce, shown_waiting
from overlap_sweep.search import conduct
from overlap_sweep.search.knob_space import KnobSpace
from overlap_sweep.search.knob_sweeper import Searching, record_of
from overlap_sweep.search.knobs import search
from overlap_sweep.search.measured import Measurements, SearchInputs

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction

LEVERS = (*FAMILIES, "fsdp2.symmetric_memory", "torchtitan.enable_fsdp_symm_mem", "megatron.use_nccl_ub")
"""Those of NCCL, and those that put buffers where it has other kernels for them, or copy engines."""
OPTION_OF = {"fsdp": "distributed.env", "tp_training": "tp_training.env"}
"""Option of a workload that sets variables of its workers."""


def nccl(inputs: SearchInputs) -> None:
    """Searches, and writes what was found. Who asks for it allows other orders of sums. UserError, before anything
    runs, for a wrong option."""
    workload = inputs.config.workload.name
    if workload == "job":
        optimize(inputs, LEVERS, least="rounding")
    elif workload in OPTION_OF:
        _search(inputs, OPTION_OF[workload])
    else:
        raise UsageError(f"hydra/sweeper=nccl is for workload=job,{','.join(OPTION_OF)}, not for workload={workload}.")


def _search(inputs: SearchInputs, option: str) -> None:
    several = next((key for key, texts in inputs.values.items() if len(texts) > 1), None)
    if several:
        raise UsageError(f"This search chooses what to try; give one value of {several}, or sweep it without a search.")
    with shown_waiting("composing what is run"):
        space = KnobSpace(inputs, ["profile=all", *(f"{key}={text}" for key, (text,) in inputs.values.items())])
        point = space.point()
    if point.runtime.device == "cpu":
        raise UserError("NCCL runs on GPUs only; this point runs with runtime.device=cpu.")
    measurements = Measurements.begin(inputs)
    announce([point], outcomes)
    (first,) = measurements.measure([space.job((), 0)])
    if first is None or first.status != "ok" or not first.traces:
        raise UserError(f"The training as it is cannot be measured: {first.reason if first else 'the budget is over'}.")
    space.label = f"{workloads.of(point).subject(point)} on {counted(point.world_size, 'rank')}"
    with shown_waiting("reading the traces"):
        own = [measurements.directory / first.name / name for name in first.traces if is_trace_of("", name)]
        tried = tried_in(own, point.nodes)
    print(f"nccl: {len(tried)} values apply" + (", by the gain that is expected:" if tried else ""), flush=True)
    for one in tried:
        print(f"nccl:   {one.name}  {one.in_words}", flush=True)
    levers = named(FAMILIES)

    def key_of(lever: str) -> str:
        return f"+{option}.{levers[lever].environment}"

    space.knobs = knobs_of(tried, key_of, restarts=True)
    prior = prior_of(space.knobs, tried, key_of)
    searching = Searching(space, measurements, share=1.0, prior=prior)

    effort = Search(**inputs.config.search)
    if not tried:
        # Nothing is compared with the training as it is.
        effort.repeats = 1
    conduct(search(searching.trail, effort), searching.measure)
    searching.ended = True
    record = record_of(measurements, [searching])
    path = record.write(measurements.directory)
    outcomes.answered = searching.found.time_us is not None
    print("\n".join(knob_lines(record)))
    print(f"nccl: all measurements are in {path}", flush=True)


def tried_in(traces: Sequence[Path], nodes: int = 1) -> list[Candidate]:
    """Returns the values of NCCL's variables that are worth a trial by the traces of all ranks, what is expected to
    gain most first."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.diagnosis.runs import diagnose, read_ranks
    from overlap_sweep.predict.runs import predictions_of

    facts = next((one.facts for one in read_ranks(traces[:1]).values() if one.facts), None)
    findings = [*chain.from_iterable(one.findings for one in diagnose(traces))]
    shares: dict[str, float] = {}
    for finding in findings:
        shares[finding.cause] = max(finding.share, shares.get(finding.cause, 0.0))

    def predict(changes: Sequence[str]) -> list[Prediction]:
        return predictions_of(traces, changes)

    by_variable = {name: lever for name, lever in named(["nccl"]).items() if lever.environment.startswith("NCCL_")}
    recorded = Recorded(
        Training(facts.libraries if facts else frozenset()),
        shares,
        findings,
        predict=predict,
        collectives=shares_by_collective(findings),
        nccl_version=facts.nccl_version if facts else "",
        nodes=nodes,
    )
    found, _ = candidates(recorded, by_variable)
    return found
