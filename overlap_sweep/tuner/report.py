"""The answer for a model in Python: what tuning_report.json and the files beside it say."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.report.files import REPORT_FILE
from overlap_sweep.tuner.content import (
    Answer,
    BestSetting,
    Case,
    Proof,
    Recommendation,
    Setting,
    UnmeasuredSlot,
    read_content,
)
from overlap_sweep.workloads.operator.answer import Scaling

if TYPE_CHECKING:
    import pandas as pd

FILES = ("*.txt", "*.json", "*.yaml", "*.py", "*.csv", "*.parquet", "*.html")
"""What lies beside the run directories and does not belong to a single point."""


class Report:
    """The answer for a model, read from the directory of a tuner's sweep or of any analysed one."""

    def __init__(self, directory: Path | str) -> None:
        """UserError where the directory has no tuning_report.json, or one that cannot be read."""
        self.directory = Path(directory)
        self._content = read_content(self.directory / REPORT_FILE)

    @property
    def cases(self) -> list[Case]:
        """Returns what was measured: after `tune` one case."""
        return self._content.cases

    @property
    def answers(self) -> list[Answer]:
        """Returns what to do in words, an entry per TP size."""
        return self._content.answers

    @property
    def best(self) -> list[BestSetting]:
        """Returns the best setting of each TP size and slot, measured operator by operator."""
        return self._content.best

    @property
    def proof(self) -> dict[int, Proof]:
        """Returns by TP size what the whole layer says; empty where none was run."""
        return {proof.tp_size: proof for proof in self._content.proof if proof.point}

    @property
    def recommendations(self) -> list[Recommendation]:
        """Returns sentences: the proofs' verdicts, one per TP size and pass of an operator; last the unproven."""
        layers = [
            Recommendation(
                tp_size=tp_size,
                operator=None,
                pass_name=None,
                is_proven=proof.proven,
                sentence=f"TP={tp_size}: {proof.verdict}",
            )
            for tp_size, proof in self.proof.items()
        ]
        passes = [
            Recommendation(
                tp_size=one.tp_size,
                operator=one.operator,
                pass_name=one.pass_name,
                is_proven=True,
                sentence=one.recommendation,
            )
            for one in self._content.recommendations
        ]
        return [*(one for one in layers if one.is_proven), *passes, *(one for one in layers if not one.is_proven)]

    @property
    def tp_scaling(self) -> Scaling | None:
        """Returns whether a larger TP size pays, by operator and in sum; None where several cases were measured."""
        return self._content.tp_scaling

    @property
    def unmeasured_slots(self) -> list[UnmeasuredSlot]:
        """Returns the slots that no point overlapped, and what the exported files make of them."""
        return self._content.unmeasured_slots

    @property
    def files(self) -> dict[str, Path]:
        """Returns the written reports, tables and exported files by name, without the run directories."""
        # A directory that somebody sent may hold links to anything.
        here = self.directory.resolve()
        found = sorted(path for pattern in FILES for path in self.directory.glob(pattern))
        return {path.name: path for path in found if path.is_file() and path.resolve().is_relative_to(here)}

    def yaml(self, tp_size: int) -> Path:
        """Returns the path of the file for Megatron-LM. UserError when there is none for this TP size."""
        written = [answer for answer in self.answers if answer.tp_size == tp_size]
        if len(written) > 1:
            cases = ", ".join(answer.case for answer in written)
            raise UserError(
                f"TP={tp_size} was measured for several cases ({cases}); take the file of one of `answers`."
            )
        if not written or not written[0].file:
            raise UserError(f"{self.directory} has no file for TP={tp_size}: it was not searched.")
        return self.directory / written[0].file

    def switches(self, tp_size: int) -> dict[str, bool]:
        """Returns Megatron-Core's switches to train with, fields of its TransformerConfig. UserError as `yaml`."""
        return overlap_cfg.read(self.yaml(tp_size)).switches

    def megatron_arguments(self, tp_size: int) -> list[str]:
        """Returns the arguments of Megatron-LM that train with the file; empty where the answer is not to overlap.

        UserError as `yaml`, and where a switch is needed that Megatron-LM has no argument for.
        """
        path = self.yaml(tp_size)
        config = overlap_cfg.read(path)
        lines = overlap_cfg.megatron_arguments(config, tp_size, str(path))
        changed = {name: on for name, on in config.switches.items() if on != overlap_cfg.SWITCH_DEFAULTS[name]}
        missing = [f"{name}={on}" for name, on in changed.items() if name not in overlap_cfg.FLAGS]
        if lines and missing:
            raise UserError(f"Megatron-LM has no argument for {', '.join(missing)}; set it in its TransformerConfig.")
        return shlex.split("\n".join(lines))

    def ub_cfgs(self, tp_size: int) -> dict[str, Setting] | None:
        """Returns the slots of the file for Transformer Engine's `initialize_ub`; None where the answer is not to
        overlap, since an empty map gives every slot the library's default. UserError as `yaml`."""
        config = overlap_cfg.read(self.yaml(tp_size))
        return config.slots if config.switches["tp_comm_overlap"] else None

    def to_frame(self) -> pd.DataFrame:
        """Returns a row per measured point and phase; times in microseconds."""
        import pandas as pd

        return pd.read_parquet(self.directory / "points.parquet")

    def save(self, directory: Path | str) -> list[Path]:
        """Copies `files` there; returns the copies."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        if target.resolve() == self.directory.resolve():
            return list(self.files.values())
        return [Path(shutil.copy2(path, target / name)) for name, path in self.files.items()]

    def __repr__(self) -> str:
        return f"Report({str(self.directory)!r})"

    def __str__(self) -> str:
        lines = [line for case in self.cases for line in self._lines(case)]
        return "\n".join(lines or [f"{self.directory}: no operator was measured."])

    def _lines(self, case: Case) -> list[str]:
        answers = [one for one in self.answers if one.case == case.name]
        return [str(case), *(f"  TP={a.tp_size}: {a.headline}{f': {a.file}' if a.file else ''}" for a in answers)]

    def _repr_html_(self) -> str:
        """Returns the answers and the best settings for a notebook."""
        from overlap_sweep.tuner.notebook import html

        return html(self)
