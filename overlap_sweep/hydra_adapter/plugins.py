"""The options of our launchers and sweepers, and what launchers return.

Not in the plugin's module, which Hydra executes again in every process that loads plugins: its classes would differ
from those of the configurations that are pickled for Slurm jobs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig, OmegaConf, open_dict, read_write


@dataclass
class TorchrunLauncherConf:
    """Runs on this machine, one torchrun group at a time."""

    _target_: str = "hydra_plugins.overlap_sweep_config.TorchrunLauncher"


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """Submits Slurm jobs of many points. Options are resolved for every point."""

    _target_: str = "hydra_plugins.overlap_sweep_config.ClusterLauncher"
    nodes: int = "${nodes_of_point:}"  # type: ignore[assignment]
    """Nodes of a job: runtime.nodes, or as many as a point needs if gpus_per_node is set."""
    gpus_per_node: int | None = "${gpus_of_point:}"  # type: ignore[assignment]
    """GPUs of a point on each node, such as tp_size; none with runtime.device=cpu. Set it to the GPUs that a node has,
    and points that need more span several nodes."""
    cpus_per_task: int | None = "${cpus_of_point:}"  # type: ignore[assignment]
    """CPUs of a job on each node: two for each thread of each rank."""
    points_per_job: int = 32
    """Points of one TP size that share a job."""
    max_jobs: int | None = 8
    """Maximum number of jobs for the points of one TP size; more points share a job if necessary."""
    poll_s: float = 5.0
    """Seconds between checks of Slurm and the run directories."""


@dataclass
class OnePointLauncherConf(SlurmLauncherConf):
    """Submits one Slurm job per point."""

    # Replaces the stock launcher, which would request the same GPUs at every TP size and end the sweep when a job dies.
    points_per_job: int = 1
    max_jobs: int | None = None


ABOUT_SUBMITIT = {
    "submitit_folder": "Directory of submitit's files; `%j` becomes a new name with each submission.",
    "timeout_min": "Time limit of a job, in minutes.",
    "tasks_per_node": "Tasks of a job on each node.",
    "mem_gb": "Memory of a job on each node, in GB.",
    "name": "The job's name in the queue.",
    "stderr_to_stdout": "Write stderr into the log of stdout.",
    "partition": "Slurm partition.",
    "qos": "Slurm quality of service.",
    "comment": "Comment on the job.",
    "constraint": "Features that the nodes must have.",
    "exclude": "Nodes to leave out.",
    "gres": "Generic resources, such as gpu:h100:8, for clusters that don't support gpus_per_node.",
    "cpus_per_gpu": "CPUs for each GPU.",
    "gpus_per_task": "GPUs for each task.",
    "mem_per_gpu": "Memory for each GPU, with its unit.",
    "mem_per_cpu": "Memory for each CPU, with its unit.",
    "account": "Slurm account to charge.",
    "signal_delay_s": "Seconds before the time limit at which the job is asked to stop.",
    "max_num_timeout": "How often submitit requeues a job that ran out of time.",
    "additional_parameters": "Further options of sbatch.",
    "array_parallelism": "Maximum number of jobs that run at once.",
    "setup": "Shell commands that a job runs first.",
}
"""Explanations of submitit's options, which our dataclasses inherit without docstrings."""

LAUNCHERS: dict[str, Any] = {
    "torchrun": TorchrunLauncherConf(),
    "slurm": SlurmLauncherConf(),
    "submitit_slurm": OnePointLauncherConf(),
}


@dataclass
class GridSweeperConf(BasicSweeperConf):
    """Measures every combination of the swept values."""

    _target_: str = "hydra_plugins.overlap_sweep_config.GridSweeper"


@dataclass
class SearchSweeperConf:
    """Measures the points that a search chooses."""

    search: str
    """The function that searches, as module:name."""
    _target_: str = "hydra_plugins.overlap_sweep_config.SearchSweeper"
    params: dict[str, Any] = field(default_factory=dict)
    """Values to search, by key; those on the command line win."""


@dataclass(frozen=True)
class SweeperPlugin:
    """A choice of hydra/sweeper."""

    conf: GridSweeperConf | SearchSweeperConf
    """Its node for Hydra."""
    about: str
    options: tuple[str, ...] = ()
    """Prefixes of the options of points that it reads."""


SWEEPERS = {
    # Has the name of Hydra's own: if conf/config.yaml overrode the sweeper, no experiment could override it again.
    "basic": SweeperPlugin(GridSweeperConf(), "Measures every combination of the swept values."),
    "bisect": SweeperPlugin(
        SearchSweeperConf("overlap_sweep.search.sweeper:sweep"),
        "Searches the settings of operators: num_sm by bracketing, other knobs by elimination.",
        ("search.",),
    ),
    "knobs": SweeperPlugin(
        SearchSweeperConf("overlap_sweep.search.knob_sweeper:sweep"),
        "Searches the knobs of workloads whose points have one time each, one knob after the other.",
        ("search.",),
    ),
    "nccl": SweeperPlugin(
        SearchSweeperConf("overlap_sweep.optimizer.nccl:nccl"),
        "Searches what NCCL should use in a training, for each process group by what its trace shows.",
        ("search.", "optimize."),
    ),
    "optimize": SweeperPlugin(
        SearchSweeperConf("overlap_sweep.optimizer.workflow:optimize"),
        "Tries levers in the user's own training, those first that are predicted to gain most.",
        ("search.", "optimize."),
    ),
    "tuner": SweeperPlugin(
        SearchSweeperConf("overlap_sweep.tuner.workflow:tune"),
        "Searches every TP size and operator, and proves the result on the whole layer.",
        ("search.", "tuner.", "max_tp_size"),
    ),
}


def finished_job(config: DictConfig, overrides: Sequence[str], directory: Path, objective: float) -> JobReturn:
    """Returns the JobReturn of a job that this process did not run."""
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(directory.absolute())
    HydraConfig.instance().set_config(config)
    hydra_config: Any = HydraConfig.instance().cfg
    return JobReturn(
        overrides=overrides,
        cfg=OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]),
        hydra_cfg=copy.deepcopy(hydra_config),
        working_dir=str(Path.cwd()),
        status=JobStatus.COMPLETED,
        _return_value=objective,
    )


def error_of(returned: JobReturn) -> Exception | None:
    """Returns the exception that ended a job, or None."""
    # `return_value` would raise it, and print a line before.
    return returned._return_value if returned.status == JobStatus.FAILED else None
