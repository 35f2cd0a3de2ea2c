"""The options of our launchers and sweepers, as Hydra knows them by name.

Apart from the plugins, whose modules Hydra executes again in every process that looks for plugins: their classes would
not be those of the configurations that a Slurm job is given.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf


@dataclass
class TorchrunLauncherConf:
    """Here, one torchrun group at a time."""

    _target_: str = "hydra_plugins.overlap_sweep_config.TorchrunLauncher"


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """Slurm, with many points in a job; options are resolved for every point."""

    _target_: str = "hydra_plugins.overlap_sweep_config.SlurmLauncher"
    gpus_per_node: int | None = "${gpus_of_point:}"  # type: ignore[assignment]
    """What the point needs: tp_size; none with runtime.device=cpu."""
    cpus_per_task: int | None = "${cpus_of_point:}"  # type: ignore[assignment]
    """Two for each rank's threads."""
    points_per_job: int = 32
    """So many points of one TP size share a job."""
    max_jobs: int | None = 8
    """At most so many jobs for the points of one TP size: if need be more points share one."""
    poll_s: float = 5.0
    """How often Slurm and the run directories are looked at."""


@dataclass
class OnePointLauncherConf(SlurmLauncherConf):
    """Slurm, with every point a job of its own."""

    # As with the stock launcher, which itself would ask for the same GPUs at every TP size, and end the sweep with a
    # job that dies.
    points_per_job: int = 1
    max_jobs: int | None = None


ABOUT_SUBMITIT = {
    "submitit_folder": "Where submitit keeps its files.",
    "timeout_min": "Minutes that a job may take.",
    "tasks_per_node": "Tasks of a job on each node.",
    "mem_gb": "Memory of a job on each node, GB.",
    "nodes": "Nodes of a job.",
    "name": "The job's name in the queue.",
    "stderr_to_stdout": "Write stderr into the same log.",
    "partition": "Slurm's partition.",
    "qos": "Slurm's quality of service.",
    "comment": "Comment on the job.",
    "constraint": "Features that the nodes must have.",
    "exclude": "Nodes to leave out.",
    "gres": "Generic resources, such as gpu:h100:8, where gpus_per_node is not understood.",
    "cpus_per_gpu": "CPUs for each GPU.",
    "gpus_per_task": "GPUs for each task.",
    "mem_per_gpu": "Memory for each GPU, with its unit.",
    "mem_per_cpu": "Memory for each CPU, with its unit.",
    "account": "Whom Slurm charges.",
    "signal_delay_s": "Seconds before the time limit at which the job is told to stop.",
    "max_num_timeout": "How often submitit requeues a job that ran out of time.",
    "additional_parameters": "Any further options of sbatch.",
    "array_parallelism": "Jobs that may run at once.",
    "setup": "Shell commands that a job runs first.",
}
"""What Slurm's options mean that our dataclasses inherit without a word."""

LAUNCHERS = {
    "torchrun": TorchrunLauncherConf(),
    "slurm": SlurmLauncherConf(),
    "submitit_slurm": OnePointLauncherConf(),
}


@dataclass
class GridSweeperConf(BasicSweeperConf):
    """Measures every combination of the values."""

    _target_: str = "hydra_plugins.overlap_sweep_config.GridSweeper"


@dataclass
class SearchSweeperConf:
    """Measures what a search asks for."""

    search: str
    """The function that searches."""
    _target_: str = "hydra_plugins.overlap_sweep_config.SearchSweeper"
    params: dict[str, Any] = field(default_factory=dict)
    """Values to choose from, by key; the command line's win."""


SWEEPERS = {
    # Under the name of Hydra's own: what conf/config.yaml overrides, no experiment could override again.
    "basic": GridSweeperConf(),
    "bisect": SearchSweeperConf("overlap_sweep.search.sweeper:sweep"),
    "knobs": SearchSweeperConf("overlap_sweep.search.knob_sweeper:sweep"),
    "tuner": SearchSweeperConf("overlap_sweep.tuner.workflow:tune"),
}

ABOUT_SWEEPERS = {
    "basic": "Every combination of the values.",
    "bisect": "Searches them: num_sm by bracketing, the other knobs of operators by elimination.",
    "knobs": "Searches them for any workload with one time a point, one knob after the other.",
    "tuner": "Searches every TP size and operator, and proves the result on the whole layer.",
}

OPTIONS_OF_SWEEPERS = {"bisect": ("search.",), "knobs": ("search.",), "tuner": ("search.", "tuner.", "max_tp_size")}
"""How the options begin that they read."""
