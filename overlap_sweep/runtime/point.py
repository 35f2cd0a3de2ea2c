"""Runs one point for any launcher: resolves, refuses or measures it, and writes its result.json."""

import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.config import OF_LANGUAGE_MODELS, Model, ModelConfig, ResolvedModel, ResolvedPoint
from overlap_sweep.declared import decode, spelled, unknown_key
from overlap_sweep.errors import NodeLost, PointFailed, Refused, UsageError, UserError
from overlap_sweep.gpus import elsewhere, visible_gpus
from overlap_sweep.hydra_adapter.composition import plain
from overlap_sweep.hydra_adapter.mistakes import unknown_option
from overlap_sweep.overlap import model_forms, overlap_cfg
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.report.numbers import visible
from overlap_sweep.results.identity import instrumented
from overlap_sweep.results.run_directory import (
    RESULT_FILE,
    Attempt,
    Result,
    clear,
    log_file,
    make_durable,
    now,
    read_result,
    settings_file,
    write_atomically,
    write_result,
)
from overlap_sweep.runtime.channel import Reply, free_port
from overlap_sweep.runtime.deferred import later
from overlap_sweep.runtime.group import GROUP_LOG, WorkerPool, shared_pool
from overlap_sweep.runtime.group_config import (
    check_instruments,
    check_multicast,
    check_temporary_directory,
    check_torch,
    check_wrapper,
    environment_of,
    machine_of,
)
from overlap_sweep.runtime.kept import check_store, kept_result, remember, remembered, whole_result
from overlap_sweep.runtime.nodes import nodes_of, nodes_refusal, take, with_hosts
from overlap_sweep.runtime.outcome import Outcome, in_short, outcomes, stop_if_requested, tail
from overlap_sweep.runtime.progress import announce, measuring, shown_waiting
from overlap_sweep.runtime.stacks import gather
from overlap_sweep.workloads import Here, memory

LOG_TAIL_LINES = 20
LONGEST_ERROR = 10_000
"""Longest recorded error, in characters; some exceptions print their data."""
PRECISION_OF = {"cuda": "bf16", "cpu": "fp32"}
OPTIONS_OF = {"cuda": {"tokens": 8192, "repeats": 21}, "cpu": {"tokens": 128, "repeats": 7}}
"""Values of `precision`, and of options of `workload`, that are null, by device."""
LEAST_LIMIT_S = 30.0
"""Shortest time limit: a first pass may compile, and a profile may be written."""


def resolve(config: DictConfig) -> ResolvedPoint:
    """Returns the completed point of a composed configuration; values that depend on model and machine are filled in.

    UserError if a value is unknown or out of range, the point needs more GPUs than are visible, or no group of workers
    could be started on this machine.
    """
    composed = plain(config)
    workload = workloads.load(composed["workload"]["name"])
    schema = workloads.schema(workload.name)
    composed = spelled(composed, schema)
    if key := unknown_key(composed, schema):
        raise UsageError(unknown_option(key, workload.name))
    asked = decode(composed, schema)
    if isinstance(asked, ModelConfig):
        _refuse_idle(asked)
        if asked.model.num_layers == 0:
            # From a config.json where the preset has none.
            asked.model.num_layers = (asked.model_preset or {}).get("num_layers")
    if asked.backend != "auto":
        workload.backend(asked.backend)
    asked = workloads.with_ranks(asked)
    if asked.precision and schema.precision_option:
        raise UsageError(
            f"workload={workload.name} does not use precision={asked.precision}; set {schema.precision_option}."
        )
    if isinstance(asked, ModelConfig):
        asked.model = replace(_resolved_model(tuple(vars(asked.model).items())))
        if "architecture" not in asked.reads_of_model:
            for option in {*OF_LANGUAGE_MODELS} - {"num_layers"}:
                setattr(asked.model, option, None)
    runtime, options = asked.runtime, asked.workload
    if runtime.device == "auto":
        runtime.device = "cuda" if elsewhere() or visible_gpus() else "cpu"
    runtime.nodes = nodes_of(asked)
    needed = -(-workloads.gpus(asked) // runtime.nodes)
    if runtime.device == "cuda" and not elsewhere() and needed > visible_gpus():
        (too_many, fewer), visible = workload.fewer_gpus(asked), visible_gpus()
        mend = f"use {fewer}" if visible else "check nvidia-smi and CUDA_VISIBLE_DEVICES"
        of_node = " on each node" if runtime.nodes > 1 else ""
        raise UserError(
            f"{too_many} needs {needed} GPUs{of_node}, but {visible} are visible; {mend}, or runtime.device=cpu."
        )
    if not (schema.precision_from and getattr(asked, schema.precision_from)):
        asked.precision = asked.precision or PRECISION_OF[runtime.device]
    for name, value in OPTIONS_OF[runtime.device].items():
        if hasattr(options, name) and getattr(options, name) is None:
            setattr(options, name, value)
    check_multicast(runtime, os.environ)
    check_instruments(asked)
    completed = workloads.completed(asked)
    # A workload with processes of its own says itself what it lacks.
    if not elsewhere() and not workload.run_here:
        check_torch()
        check_wrapper(completed)
        check_temporary_directory()
    return completed


def _refuse_idle(asked: ModelConfig) -> None:
    """Raises UserError if the user set a key of `model` that the workload ignores."""
    if asked.model_preset is None:
        # The user's own configuration, which composes no preset.
        return
    preset = {**asdict(Model()), **asked.model_preset}
    model = vars(asked.model)
    changed = [key for key, value in model.items() if value != preset[key]]
    own_sizes = [name for name in asked.own_sizes if getattr(asked, name) is not None]
    used = () if own_sizes else asked.reads_of_model
    idle = next((key for key in changed if key not in used), None)
    if idle is None:
        return
    instead = asked.instead_of_model.get(idle)
    uses = f"it uses model.{{{','.join(used)}}}" if used else "it uses nothing of model"
    condition = f" with {' and '.join(own_sizes)}" if own_sizes else ""
    raise UsageError(
        f"workload={asked.workload.name}{condition} does not use model.{idle}={model[idle]}; "
        f"{f'set {instead}; ' if instead else ''}{uses}."
    )


@cache
def _resolved_model(model: tuple[tuple[str, Any], ...]) -> ResolvedModel:
    return model_forms.resolve(Model(**dict(model)))


def run_point(config: DictConfig, directory: Path, may_keep: bool = False) -> float:
    """Measures the point into `directory`; returns its objective in microseconds, infinite if there is none.

    With `may_keep`, a valid result in the directory is kept instead.
    """
    point = resolve(config)
    check_store(config)
    announce([point], outcomes)
    kept = kept_result(directory, point) if may_keep else None
    result = kept or remembered(config, point, directory) or measure(point, directory)

    def report() -> None:
        if not kept:
            make_durable(directory)
            remember(config, result, directory)
        outcomes.add(Outcome(directory, result))

    later(directory, report)
    return objective_us(result)


def objective_us(result: Result | None) -> float:
    """Returns the objective that sweepers minimise; infinite if nothing was measured."""
    return math.inf if result is None or result.objective_us is None else result.objective_us


class TimeLimits:
    """Time limits of points, learnt from the durations of similar ones, and what else a search asks of points."""

    def __init__(self) -> None:
        self._longest_s: dict[tuple[object, ...], float] = defaultdict(float)
        self._ends_s = math.inf
        self.give_up_us: float | None = None
        self.inspects = False

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """Has what is measured inside the block find out what could be changed in it (`Here.inspects`)."""
        self.inspects = True
        try:
            yield
        finally:
            self.inspects = False

    @contextmanager
    def giving_up(self, above_us: float) -> Iterator[None]:
        """Gives up what is measured inside the block once its steps are seen to take longer than that. Only workloads
        that start their own processes in this one's, and can do so (`Here.give_up_us`)."""
        self.give_up_us = above_us
        try:
            yield
        finally:
            self.give_up_us = None

    def gives_up(self, result: Result) -> bool:
        """Returns whether a result that was given up earlier is as slow as what is given up now."""
        shown_us = result.measured.shown_us(result) if result.measured else None
        return self.give_up_us is not None and shown_us is not None and shown_us > self.give_up_us

    @contextmanager
    def until(self, ends_s: float) -> Iterator[None]:
        """Ends what is measured inside the block at that time of the monotonic clock."""
        self._ends_s = ends_s
        try:
            yield
        finally:
            self._ends_s = math.inf

    @property
    def are_over(self) -> bool:
        return time.monotonic() >= self._ends_s

    def learn(self, result: Result) -> None:
        if result.gave_up or result.reused_from or instrumented(result.point):
            return
        if result.status == "ok" and result.wall_s:
            kind = _kind(result.point)
            self._longest_s[kind] = max(self._longest_s[kind], result.wall_s)

    def limit_s(self, point: ResolvedPoint) -> float:
        """Returns `runtime.timeout_s`, or a shorter limit if similar points were measured or a search's time is nearly
        over."""
        runtime, longest_s = point.runtime, self._longest_s.get(_kind(point))
        most_s, factor = float(runtime.timeout_s), runtime.timeout_factor
        most_s = min(most_s, max(LEAST_LIMIT_S, factor * longest_s)) if longest_s and factor else most_s
        return min(most_s, max(0.0, self._ends_s - time.monotonic()))


def _kind(point: ResolvedPoint) -> tuple[object, ...]:
    """Returns a key of the properties that roughly determine the duration of a point."""
    workload, options = workloads.of(point), point.workload
    common = (point.model.name, point.world_size, point.backend, point.precision)
    size = (
        workload.name,
        workload.subject(point),
        getattr(options, "tokens", None),
        getattr(options, "repeats", None),
        *workload.cost(point),
    )
    return (*common, point.runtime.device, *size)


limits = TimeLimits()
"""The time limits of this process."""


def measure(point: ResolvedPoint, directory: Path) -> Result:
    """Measures the point in a group of workers, with retries, and returns its result, which is written.

    It lasts after power loss once `make_durable` was called.
    """
    clear(directory)
    workload = workloads.of(point)
    reason = nodes_refusal(point) or workload.refusal(point) or _memory_refusal(point)
    if reason:
        return _without_times(point, directory, Reply("skipped", reason), now())
    for variant, settings in workload.overlap_configs(point).items():
        write_atomically(directory / settings_file(variant), overlap_cfg.text(settings).encode(), durable=False)
    earlier: list[Attempt] = []
    pool = shared_pool(directory / GROUP_LOG)
    for left in reversed(range(point.runtime.retries + 1)):
        logs = [directory / log_file(node) for node in range(point.nodes)]
        started, log_starts = now(), {log: log.stat().st_size if log.exists() else 0 for log in logs}
        limit_s = limits.limit_s(point)
        with shown_waiting(measuring(directory.name, limit_s)):
            reply = _attempt(pool, point, directory, limit_s, earlier)
        if reply.status == "ok":
            result = read_result(directory / RESULT_FILE)
            limits.learn(result)
            return result
        error, said = reply.error[:LONGEST_ERROR], ""
        if reply.status == "skipped":
            break
        if reply.status == "timeout" and limits.are_over:
            error = f"{outcomes.option('search.max_minutes')} ended it after {limit_s:.0f} s"
        log, why = directory / log_file(reply.node), in_short(f"{reply.status}: {error}")
        said = tail(log, LOG_TAIL_LINES, log_starts[log])
        error = "\n".join([error, *gather(directory, log)])
        if reply.final or limits.are_over:
            break
        # A new group and an empty directory, so that neither leftover state nor files affect the next attempt.
        pool.close()
        clear(directory)
        if left:
            attempt = f"attempt {len(earlier) + 2} of {len(earlier) + 1 + left}"
            print(visible(f"again   {directory.name}  {why}  ({attempt})"), flush=True)
            earlier.append(Attempt(status=reply.status, error=error, started=started, where=platform.node()))
            stop_if_requested()
    error = "\n".join(filter(None, (error, said)))
    return _without_times(point, directory, replace(reply, error=error), started, earlier)


def _memory_refusal(point: ResolvedPoint) -> str | None:
    """Returns why the ranks of a point on CPUs cannot hold their parameters, or None. Warns if more may not fit. Ranks
    on GPUs look themselves."""
    workload, here = workloads.of(point), "this machine"
    estimate = workload.memory(point) if point.runtime.device == "cpu" else None
    if estimate is None:
        return None
    ranks, fewer, available_bytes = point.ranks_per_node, workload.less_memory, memory.host_bytes()
    if reason := memory.refusal(estimate, ranks, available_bytes, here, fewer):
        return reason
    if sentence := memory.warning(estimate, ranks, available_bytes, here, fewer):
        print(f"warning: {point.model.name} {sentence}", file=sys.stderr, flush=True)
    return None


def _attempt(
    pool: WorkerPool, point: ResolvedPoint, directory: Path, limit_s: float, earlier: Sequence[Attempt]
) -> Reply:
    try:
        if workloads.of(point).run_here:
            # Idle workers would disturb the measurement.
            pool.close()
            reply = _run_here(point, directory, limit_s, earlier)
        else:
            reply = pool.run(point, directory, limit_s, earlier)
    except PointFailed as failure:
        return Reply("timeout" if failure.timed_out else "failed", str(failure), failure.final, node=failure.node)
    except NodeLost:
        # The first node may have written a result before the lost one had written its traces.
        clear(directory)
        raise
    if reply.status == "ok" and whole_result(directory) is None:
        return Reply("failed", f"the workers wrote no complete {RESULT_FILE}")
    return reply


def _load() -> dict[str, float]:
    """Returns how many processes want to run on this machine, on average over a minute, and its cores."""
    return {"load_1min": os.getloadavg()[0], "cores": os.cpu_count() or 1}


def _run_here(point: ResolvedPoint, directory: Path, limit_s: float, earlier: Sequence[Attempt]) -> Reply:
    """Runs a point that starts its own processes, and writes its result. Returns a reply as workers do."""
    workload, started, clock, before = workloads.of(point), now(), time.perf_counter(), _load()
    assert workload.run_here
    own, *others = nodes = take(point.nodes, point.runtime.start_timeout_s)
    here = Here(
        environment=environment_of(point),
        limit_s=limit_s,
        give_up_us=limits.give_up_us,
        inspects=limits.inspects,
        host=own.address,
        port=free_port(),
        start_on_others=[other.start for other in others],
        host_names=[node.host for node in nodes],
        interfaces=[node.interface if others else None for node in nodes],
    )
    try:
        measured = workload.run_here(point, directory, here)
    except Refused as reason:
        return Reply("skipped", str(reason))
    result = Result(
        name=directory.name,
        recorded=dict(point),
        status="ok",
        settings=workload.overlap_configs(point).get("", OverlapConfig()).slots,
        environment={**with_hosts(machine_of(point), nodes), **measured.pop("environment", {})},
        conditions={"before": before, "after": _load()},
        started=started,
        wall_s=time.perf_counter() - clock,
        earlier_attempts=list(earlier),
        **measured,
    )
    write_result(directory, result)
    return Reply("ok")


def _without_times(
    point: ResolvedPoint, directory: Path, reply: Reply, started: str, earlier: Sequence[Attempt] = ()
) -> Result:
    """Writes and returns the result of a point that was not measured, with the reason."""
    configs = workloads.of(point).overlap_configs(point)
    result = Result(
        name=directory.name,
        recorded=dict(point),
        status=reply.status,
        error=reply.error,
        settings=configs.get("", OverlapConfig()).slots,
        relative_error=dict(reply.relative_error),
        environment=machine_of(point),
        started=started,
        earlier_attempts=list(earlier),
    )
    write_result(directory, result)
    return result
