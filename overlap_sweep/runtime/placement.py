"""How many machines a point's ranks are spread over, and why they cannot be."""

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import workloads
from overlap_sweep.config import PointConfig, ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import elsewhere
from overlap_sweep.runtime.nodes import nodes_here


def nodes_of(point: PointConfig) -> int:
    """Returns the machines that a point gets. UserError if this launch has fewer."""
    launcher = HydraConfig.instance().cfg.hydra.launcher if HydraConfig.initialized() else None  # type: ignore[union-attr]
    wanted = requested(point, launcher)
    if not elsewhere() and wanted > nodes_here():
        raise UserError(
            f"runtime.nodes={wanted} needs {wanted} machines, but this launch has {nodes_here()}; use "
            f"hydra/launcher=slurm, or start launch.py on each machine by torchrun --nnodes={wanted} (see clusters.md)."
        )
    return wanted


def requested(config: PointConfig, launcher: DictConfig | None) -> int:
    """Returns the machines that the user asked for: `runtime.nodes`, `hydra.launcher.nodes`, or those that it takes to
    have a point's GPUs with `hydra.launcher.gpus_per_node`; otherwise 1. UserError if two of them differ."""
    nodes, of_launcher = config.runtime.nodes, given(launcher, "nodes")
    if nodes and of_launcher and nodes != of_launcher:
        raise UserError(f"runtime.nodes={nodes} and hydra.launcher.nodes={of_launcher} differ; give only one.")
    if asked := nodes or of_launcher:
        return int(asked)
    gpus_per_node = given(launcher, "gpus_per_node")
    if not gpus_per_node or config.runtime.device == "cpu":
        return 1
    return max(1, -(-workloads.gpus(config) // gpus_per_node))


def given(launcher: DictConfig | None, option: str) -> int | None:
    """Returns an option of the launcher if the user gave it: the defaults depend on the points, and these on it."""
    # Asking whether it is `in` the configuration would resolve the default, which asks for this.
    if launcher is None or option not in list(launcher) or OmegaConf.is_interpolation(launcher, option):
        return None
    return None if launcher[option] is None else int(launcher[option])


def refusal(point: ResolvedPoint) -> str | None:
    """Returns why a completed point's ranks cannot be spread over its machines; None if they can."""
    nodes = point.nodes
    if nodes == 1:
        return None
    ranks = point.world_size
    if ranks % nodes:
        return f"{ranks} ranks cannot be spread evenly over runtime.nodes={nodes}"
    if workloads.of(point).idle_gpus(point):
        return f"workload={point.workload.name} needs a GPU without a rank, which only one node has"
    return workloads.of(point).on_one_node(point)
