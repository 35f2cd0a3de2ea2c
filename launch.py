"""Measure one point, or with -m a sweep of points. See `python launch.py --help`."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import run_point


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    """Returns the point's objective: the median time in microseconds, which Hydra's sweepers minimise."""
    try:
        return run_point(config, Path(HydraConfig.get().runtime.output_dir))
    except UserError as error:
        # Not an exception that Hydra would wrap in its own lines.
        sys.exit(f"error: {error}")


def print_layers() -> None:
    """The tables of the layers that were measured: few enough to be read at once, unlike the points of a sweep."""
    measured = [outcome.directory for outcome in outcomes.all if outcome.is_layer and outcome.status == "ok"]
    if measured:
        from overlap_sweep.analysis.points import read_points
        from overlap_sweep.report.console import console_for
        from overlap_sweep.report.layers import print_layer

        for directory in measured:
            print_layer(read_points(directory).points[0], console_for(sys.stdout))


if __name__ == "__main__":
    try:
        main()
        if not outcomes.searching:
            print_layers()
    except KeyboardInterrupt:
        print(f"interrupted: {outcomes.counts_line()}; finished results are kept", file=sys.stderr)
        sys.exit(130)
    sys.exit(outcomes.conclude())
