"""Weights & Biases: a run for each point, and one for the sweep, in one group. Where they are sent, or that nothing is
sent (WANDB_MODE=offline), is said by its own variables of the environment and by `wandb login`."""

from __future__ import annotations

import os

from overlap_sweep.errors import UserError
from overlap_sweep.trackers import PROJECT, Run

SERVICE = "WANDB_SERVICE"
"""Variable by which processes that we start would use the service of our own runs."""
INIT_S = 30.0
"""Seconds to wait for the server."""


def connect() -> Wandb:
    """Returns the tracker. UserError without a login, for which wandb would ask on a terminal and wait."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode not in ("offline", "disabled") and not wandb.api.api_key:
        raise UserError("wandb has no API key; run `wandb login`, or set WANDB_MODE=offline.")
    return Wandb()


class Wandb:
    place = ""

    def start_sweep(self, sweep: Run) -> None:
        """A group needs no start."""

    def log_point(self, point: Run, sweep: Run | None) -> None:
        self._log(point, "point", sweep)

    def finish_sweep(self, sweep: Run) -> None:
        self._log(sweep, "sweep", sweep)

    def _log(self, run: Run, kind: str, sweep: Run | None) -> None:
        import wandb

        service = os.environ.get(SERVICE)
        # By itself it would also log the command line, console, git repository and machine, and any of them may
        # contain secrets.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=INIT_S,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        stored = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.key,
            resume="allow",
            name=run.name,
            notes=run.about or None,
            group=f"{sweep.name} {sweep.key[:6]}" if sweep else None,
            job_type=kind,
            config=dict(run.params),
            settings=settings,
            allow_val_change=True,
        )
        try:
            stored.summary.update({**run.metrics, "error": "", **run.texts})
            for path in run.files:
                stored.save(str(path.absolute()), base_path=str(path.absolute().parent), policy="now")
            self.place = stored.url or f"offline in {stored.settings.wandb_dir}; send them with wandb sync"
        finally:
            stored.finish(exit_code=0 if run.ok else 1)
            if service is None:
                os.environ.pop(SERVICE, None)
