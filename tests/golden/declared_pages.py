"""docs/options.md, docs/columns.md, tables of docs/effects.md and levers.md, written from where all is declared; and
the example of docs/diagnosis.md, as the command prints it."""

import re
import tarfile
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import chdir
from functools import cache
from itertools import dropwhile

from overlap_sweep import workloads
from overlap_sweep.commands import levers as levers_command
from overlap_sweep.commands import schemas
from overlap_sweep.effects import ASPECTS
from overlap_sweep.effects.settings import Known, known_settings
from overlap_sweep.hydra_adapter.help import Page, choices, launcher_page, section_page, sentences
from overlap_sweep.hydra_adapter.overrides import GROUPS, NUMBERED, workloads_with_section
from overlap_sweep.hydra_adapter.plugins import LAUNCHERS, SWEEPERS
from overlap_sweep.levers import Lever, levers
from overlap_sweep.options import sections_of
from tests.analyze import ROOT, analyze
from tests.composed import hydra
from tests.golden.workload_files import CONF

OPTIONS = """\
# Options

What `launch.py` takes, as `option=value`. Written by `make golden`; `python launch.py workload=<name> --help` prints
the same with the values of a command line. `null` leaves the choice to the tool, as the option's sentence says.
"""


COLUMNS = """\
# Columns

What `--format csv`, `json` and `parquet` print, and what an expression may ask for. Written by `make golden`.
"""


def columns() -> str:
    """Returns docs/columns.md."""
    parts = [COLUMNS]
    for command, tables in schemas.tables_of().items():
        for heading, table in tables.items():
            parts.append(f"## `{command}` {heading}\n\n{table.rows[0].upper()}{table.rows[1:]}.\n")
            rows = ((f"`{column.name}`", column.unit, column.about) for column in table.written)
            parts.append("| column | unit or type | what it is |\n|---|---|---|\n" + _rows(rows))
    return "\n".join(parts)


def json_schemas() -> dict[str, str]:
    """Returns the JSON schemas of the outputs of all commands, by command."""
    commands = (*schemas.tables_of(), *schemas.OBJECTS)
    return {command: schemas.as_text(schemas.schema_of(command)) for command in commands}


def effects(page: str) -> str:
    """Returns docs/effects.md with the rows of its tables of aspects and settings written anew."""
    known = known_settings().items()
    settings = [
        (", ".join(f"`{each}`" for each in (name, *one.names)), one.what, ", ".join(one.shows), _pitfalls(one))
        for name, one in known
    ]
    tables: dict[str, Sequence[tuple[str, ...]]] = {
        "| aspect | what it is |": [(f"`{name}`", about) for name, about in ASPECTS.items()],
        "| setting | what it sets | where it shows | when not, or when it is ignored |": settings,
    }
    for head, rows in tables.items():
        page = _with_rows(page, head, rows)
    return page


def levers_page(page: str) -> str:
    """Returns docs/levers.md with the rows of its table written anew."""
    rows = [
        (
            f"`{name}`",
            ". ".join(filter(None, (one.what, one.note))),
            levers_command.in_words(one.values),
            one.results,
            ", ".join(one.causes),
            _seen_in(one),
            "<br>".join(f"`{line}`" for line in one.shown(one.only_value).splitlines()),
        )
        for name, one in levers().items()
    ]
    head = "| lever | what it sets, and pitfalls | worth trying | results | can mend | seen in | what to write |"
    return _with_rows(page, head, rows)


EXAMPLE = ("issued_late", "dependency")
"""Causes whose first findings docs/diagnosis.md shows."""


def diagnosis(page: str) -> str:
    """Returns docs/diagnosis.md with its first output written anew."""
    head, *findings = diagnosed("causes/h200x2", "fsdp2_no_prefetch").strip().split("\n\n")
    causes = [re.sub(r"\W|\d", "", finding.split(":")[0]) for finding in findings]
    shown = [head, *(findings[causes.index(cause)] for cause in EXAMPLE), "..."]
    lines = (
        textwrap.fill(line, 96, subsequent_indent=" " * 5, break_on_hyphens=False)
        for text in shown
        for line in [*text.splitlines(), ""]
    )
    return re.sub(r"(?<=```\n)fsdp2_no_prefetch/.*?(?=^```$)", lambda _: "\n".join(lines), page, flags=re.M | re.S)


@cache
def diagnosed(archive: str, recording: str) -> str:
    """Returns what `diagnose` prints of a recording below tests/data."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ROOT / f"tests/data/{archive}.tar.xz") as packed:
        packed.extractall(folder, [one for one in packed if recording in one.name.split("/")], filter="data")
        with chdir(folder):
            return analyze("diagnose", recording).stdout


def _seen_in(lever: Lever) -> str:
    """Returns the aspects of what ran in which the lever shows; empty if its note says how."""
    return ", ".join(known_settings()[lever.effect].shows) or "nothing" if lever.effect else ""


def _with_rows(page: str, head: str, rows: Iterable[tuple[str, ...]]) -> str:
    before, _, after = page.partition(f"{head}\n")
    rule, *lines = after.splitlines()
    rest = list(dropwhile(lambda line: line.startswith("|"), lines))
    return "\n".join([f"{before}{head}", rule, _rows(rows).rstrip(), *rest, ""])


def _pitfalls(setting: Known) -> str:
    unseen = f"Not to be seen if {setting.unseen}." if setting.shows and setting.unseen else ""
    never = f"Cannot be seen: {setting.unseen}." if setting.unseen and not setting.shows else ""
    return " ".join(filter(None, (unseen, never, setting.ignored)))


def options() -> str:
    """Returns docs/options.md."""
    parts = [OPTIONS, "## Config groups\n", _groups(), "## Experiments\n", _experiments()]
    schemas = map(workloads.schema, workloads.names())
    users = {section: workloads_with_section(section) for schema in schemas for section in sections_of(schema)}
    for using in sorted(dict.fromkeys(users.values()), key=len):
        named = "every workload" if using == workloads.names() else " and ".join(f"`workload={one}`" for one in using)
        parts.append(f"## Options of {named}\n")
        sections = sections_of(workloads.schema(using[0])).items()
        for page in (section_page(section, options) for section, options in sections if users[section] == using):
            parts += [page.about + "\n" if page.about else "", _table(page)]
    launchers = [(f"`{name}`", launcher_page(name, type(node)).about) for name, node in LAUNCHERS.items()]
    parts += ["## Launchers\n", "| `hydra/launcher=` | |\n|---|---|\n" + _rows(launchers)]
    parts += ["`slurm` and `submitit_slurm` take:\n", _table(launcher_page("slurm", type(LAUNCHERS["slurm"])))]
    sweepers = []
    for name, sweeper in SWEEPERS.items():
        read = (f"`{each}*`" if each.endswith(".") else f"`{each}`" for each in sweeper.options)
        sweepers.append((f"`{name}`", sweeper.about, ", ".join(read)))
    parts += ["## Sweepers\n", "| `hydra/sweeper=` | | options |\n|---|---|---|\n" + _rows(sweepers)]
    return "\n".join(filter(None, parts))


def _groups() -> str:
    loader, groups = hydra().config_loader, [group for group in GROUPS if not group.startswith("hydra/")]
    rows = [(group, choices(loader, group)) for group in groups]
    said = [
        (f"`{group}={choice}`", sentence)
        for group in groups
        for choice, sentence in sentences(loader, group).items()
        if group != "experiment"
    ]
    return (
        "| group | choices |\n|---|---|\n"
        + _rows(
            (
                f"`{'+' * (group == 'experiment')}{group}=`",
                ", ".join([*(f"`{name}`" for name in found), *["or any other number"] * (group in NUMBERED)]),
            )
            for group, found in rows
        )
        + "\n| choice | |\n|---|---|\n"
        + _rows(said)
    )


def _experiments() -> str:
    files = sorted((CONF / "experiment").glob("*.yaml"))
    return "| `+experiment=` | |\n|---|---|\n" + _rows(
        (f"`{path.stem}`", path.read_text().splitlines()[1].removeprefix("# ")) for path in files
    )


def _table(page: Page) -> str:
    rows = ((f"`{o.name}`", f"`{o.default}`" if o.default else "", o.values, o.about) for o in page.options)
    return "| option | default | values | |\n|---|---|---|---|\n" + _rows(rows)


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)
