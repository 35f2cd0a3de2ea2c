"""A whole search in this process: Hydra composes every point, and a stand-in for the launcher makes up its result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import workloads
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.hydra_adapter.composition import compose_point
from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.run_directory import Result, read_result, write_result
from overlap_sweep.runtime.group_config import machine_of
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.measured import SearchInputs
from tests.composed import multirun
from tests.make_point import made_result, pass_times, variant

NONE_US = {"fwd": 1000.0, "bwd": 2000.0}
SIZES = ("model.hidden_size=256", "model.ffn_hidden_size=512", "model.num_attention_heads=8", "model.num_kv_heads=4")
ON_CPU = ("runtime.device=cpu", "workload.tokens=64", "profile=none", *SIZES)

Settings = Mapping[str, space.Setting]
Answer = Callable[[ResolvedPoint], Result]


def operator_result(
    point: Mapping[str, Any], ratio: Callable[[str, Settings], float] = lambda pass_name, settings: 1.0, **fields: Any
) -> Result:
    """Every pass takes `ratio` of what none takes, by its settings; the GEMMs alone half of it."""
    given = space.settings(point)
    times = {}
    for name, none_us in NONE_US.items():
        own = {s: setting for s, setting in given.items() if space.PASS_OF_PHASE[s.partition("_")[2]] == name}
        point_us = none_us * (ratio(name, own) if own else 1.0)
        times[name] = pass_times(point_us, none_us, none_us / 2, tp1_us=none_us / 2 * point["tp_size"])
    return made_result("operator", point, **{**times, "objective_us": 1.0, "started": None, **fields})


def layer_result(point: Mapping[str, Any], ratio: Callable[[OverlapConfig], float]) -> Result:
    """Every variant that can run takes `ratio` of none, by its configuration; the floor takes half."""
    configs = {"none": OverlapConfig({}, {}), **workloads.load("layer").overlap_configs(point)}
    ratios = {name: ratio(config) if name != "none" else 1.0 for name, config in configs.items()} | {"floor": 0.5}
    # What the machine does to all variants of a round alike.
    rounds_us = [10_000.0 * slow for slow in (0.999, 1.0, 1.001, 1.0, 0.999, 1.001, 1.0)]
    variants = {}
    for name, share in ratios.items():
        config = configs.get(name, OverlapConfig({}, {}))
        times_us = [time_us * share for time_us in rounds_us]
        variants[name] = variant(times_us, settings=config.slots, switches=config.switches)
    known = {"attention_backend": "made up", "objective_us": 10_000.0, "started": None}
    return made_result("layer", point, variants=variants, **known)


@dataclass
class StandIn(Launcher):
    """Skips what the workload refuses; writes what `answer` says of everything else."""

    config: DictConfig
    context: HydraContext
    answer: Answer
    batches: list[list[ResolvedPoint]] = field(default_factory=list)
    """The points that were launched."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """It is."""

    def inputs(self, *arguments: str, params: Mapping[str, Any] | None = None) -> SearchInputs:
        """What Hydra gives to a search."""
        return SearchInputs(self.config, self.context, self, params or {}, arguments)

    @property
    def points(self) -> list[ResolvedPoint]:
        return [point for batch in self.batches for point in batch]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        assert initial_job_idx == len(self.points)
        self.batches.append([])
        return [self._run(list(overrides)) for overrides in job_overrides]

    def _run(self, overrides: list[str]) -> JobReturn:
        job = compose_point(self.context.config_loader, self.config, overrides)
        HydraConfig.instance().set_config(job)
        directory = Path(str(job.hydra.sweep.dir)) / str(job.hydra.sweep.subdir)
        point = resolve(job)
        self.batches[-1].append(point)
        refusal = workloads.of(point).refusal(point)
        result = (
            Result(name="", recorded=dict(point), status="skipped", error=refusal) if refusal else self.answer(point)
        )
        result.name, result.environment = directory.name, machine_of(point)
        directory.mkdir(exist_ok=True)
        write_result(directory, result)
        left = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(directory)}}})
        return JobReturn(hydra_cfg=left, status=JobStatus.COMPLETED)


@contextmanager
def sweep_of(directory: Path, *overrides: str, answer: Answer = operator_result) -> Iterator[StandIn]:
    """A launcher with the configuration and the context of a multirun into `directory`."""
    before = outcomes.searching, outcomes.answered
    loader, config = multirun(*overrides, f"hydra.sweep.dir={directory}")
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield StandIn(config, context, answer)
    finally:
        outcomes.searching, outcomes.answered = before
        HydraConfig.instance().cfg = None


def results(directory: Path) -> dict[str, Result]:
    """By run directory."""
    return {path.parent.name: read_result(path) for path in sorted(directory.glob("*/result.json"))}
