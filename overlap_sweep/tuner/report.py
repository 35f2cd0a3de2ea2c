"""The tuner's answer for a model in Python, read from tuning_report.json and the exported files."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.report.files import REPORT_FILE
from overlap_sweep.report.table import Column
from overlap_sweep.tuner.content import (
    Answer,
    BestSetting,
    Case,
    Proof,
    Recommendation,
    UnmeasuredSlot,
    read_content,
)
from overlap_sweep.workloads.operator.answer import Scaling, SlotAnswer
from overlap_sweep.workloads.operator.columns import ANSWERS

if TYPE_CHECKING:
    import pandas as pd

FILES = ("*.txt", "*.json", "*.yaml", "*.py", "*.csv", "*.parquet", "*.html")
"""Patterns of the report's files, which are next to the run directories."""


class Report:
    """The answer for a model, read from the directory of a tuner's sweep or any analysed sweep."""

    def __init__(self, directory: Path | str) -> None:
        """Reads the directory's tuning_report.json. UserError if it is missing or cannot be read."""
        self.directory = Path(directory)
        self._content = read_content(self.directory / REPORT_FILE)

    @property
    def cases(self) -> list[Case]:
        """Returns the measured cases; after `tune` there is one."""
        return self._content.cases

    @property
    def answers(self) -> list[Answer]:
        """Returns the recommendation in words, one per case and TP size."""
        return self._content.answers

    @property
    def best(self) -> list[BestSetting]:
        """Returns the best setting of each TP size and slot, from single operators."""
        return self._content.best

    @property
    def proof(self) -> dict[int, Proof]:
        """Returns the proofs on the whole layer by TP size; empty if none was run."""
        return {proof.tp_size: proof for proof in self._content.proof if proof.point}

    @property
    def recommendations(self) -> list[Recommendation]:
        """Returns the recommendations: layers that decide, then passes of operators, then other layers."""
        decided, others = list[Recommendation](), list[Recommendation]()
        for tp_size, proof in self.proof.items():
            layer = Recommendation(
                tp_size=tp_size,
                operator=None,
                pass_name=None,
                is_proven=proof.proven,
                sentence=f"TP={tp_size}: {proof.verdict}",
            )
            (decided if proof.recommended else others).append(layer)
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
        return [*decided, *passes, *others]

    @property
    def tp_scaling(self) -> Scaling:
        """Returns whether a larger TP size pays, by operator and in total. UserError unless one case was measured."""
        if len(self.cases) != 1:
            several = f"has several cases ({', '.join(case.name for case in self.cases)})"
            found = f"{several}; use the `tp_scaling` of one of `cases`" if self.cases else "has no measured operator"
            raise UserError(f"{self.directory} {found}.")
        return self.cases[0].tp_scaling

    @property
    def unmeasured_slots(self) -> list[UnmeasuredSlot]:
        """Returns the slots that no point overlapped, and how they run with the exported files."""
        return self._content.unmeasured_slots

    @property
    def files(self) -> dict[str, Path]:
        """Returns the reports, tables and exported files by name, without the run directories."""
        # A directory from somebody else may contain links to anything.
        here = self.directory.resolve()
        found = sorted(path for pattern in FILES for path in self.directory.glob(pattern))
        return {path.name: path for path in found if path.is_file() and path.resolve().is_relative_to(here)}

    def yaml(self, tp_size: int) -> Path:
        """Returns the path of the file for Megatron-LM. UserError if there is none for this TP size."""
        written = [answer for answer in self.answers if answer.tp_size == tp_size]
        if len(written) > 1:
            cases = ", ".join(answer.case for answer in written)
            raise UserError(
                f"TP={tp_size} was measured for several cases ({cases}); use the `file` of one of `answers`."
            )
        if not written or not written[0].file:
            raise UserError(f"{self.directory} has no file for TP={tp_size}, which was not searched.")
        return self.directory / written[0].file

    def switches(self, tp_size: int) -> dict[str, bool]:
        """Returns Megatron-Core's switches to train with, which are fields of its TransformerConfig. UserError as in
        `yaml`."""
        return overlap_cfg.read(self.yaml(tp_size)).switches

    def megatron_arguments(self, tp_size: int) -> list[str]:
        """Returns the arguments of Megatron-LM that train with the file; empty if the answer is no overlap.

        UserError as in `yaml`, and if Megatron-LM has no argument for a necessary switch.
        """
        path = self.yaml(tp_size)
        config = overlap_cfg.read(path)
        lines = overlap_cfg.megatron_arguments(config, tp_size, str(path))
        missing = [f"{name}={on}" for name, on in overlap_cfg.switches_without_flag(config).items()]
        if lines and missing:
            raise UserError(f"Megatron-LM has no argument for {', '.join(missing)}; set it in its TransformerConfig.")
        return shlex.split("\n".join(lines))

    def ub_cfgs(self, tp_size: int) -> dict[str, Setting] | None:
        """Returns the file's settings for Transformer Engine's `initialize_ub`; None if the answer is no overlap, since
        an empty map would give every slot the library's default. UserError as in `yaml`."""
        config = overlap_cfg.read(self.yaml(tp_size))
        return config.slots if config.switches["tp_comm_overlap"] else None

    def to_frame(self) -> pd.DataFrame:
        """Returns a row per measured point and phase; times in microseconds."""
        import pandas as pd

        return pd.read_parquet(self.directory / "points.parquet")

    def save(self, directory: Path | str) -> list[Path]:
        """Copies `files` to the directory; returns the copies."""
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
        applies_to = (f"  {sentence}" for sentence in case.applies_to)
        return [
            str(case),
            *applies_to,
            *(f"  TP={a.tp_size}: {a.headline}{f': {a.file}' if a.file else ''}" for a in answers),
        ]

    def _repr_html_(self) -> str:
        """Returns a card with the answer for each TP size and a table of the best settings for a notebook: an HTML
        element with inline styles and without scripts."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        columns = [column for column in ANSWERS.shown if any(_text(best, column) for best in self.best)]
        return environment.get_template("notebook.html.j2").render(report=self, columns=columns, text=_text)


def _text(best: BestSetting, column: Column[SlotAnswer]) -> str:
    if column.name == "setting":
        setting = space.brief_name(best.setting)
        return setting if setting == best.final_setting else f"{setting}, in the file {best.final_setting}"
    return column.shown(getattr(best, column.name))
