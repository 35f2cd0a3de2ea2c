"""What is offered to whom is typing a command line: `launch.py --help`, which is a front page or the options of the
chosen workload, launcher and sweeper, and shell completion, which is Hydra's with the values of options."""

import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.declared import shown
from overlap_sweep.hydra_adapter.mistakes import flags_first
from overlap_sweep.hydra_adapter.overrides import (
    GROUPS,
    NUMBERED,
    SCHEMAS,
    option_named,
    quoted_for_hydra,
    workloads_with_section,
)
from overlap_sweep.hydra_adapter.plugins import ABOUT_SUBMITIT, LAUNCHERS, SWEEPERS
from overlap_sweep.options import NOT_GIVEN, Option, about, listed, options_of, sections_of
from overlap_sweep.program import analyze_program, launch_program

WIDTH = 120
"""Largest width of a line, in columns."""
EXAMPLES = {
    "Tune a model": "-m +experiment=tp_overlap_tuner model=llama3_70b max_tp_size=8",
    "A sweep": "-m tp_size=2,4,8 method=bulk num_sm=1,2,4,8,16",
    "One point": "operator=proj method=pipeline num_sm=8",
    "A search": "-m hydra/sweeper=bisect operator=fc1,fc2 method=bulk,pipeline num_sm=1,2,4,8,16",
    "Kernels": "-m workload=kernel kernel=ag_gemm,gemm_rs m=1024,8192 backend=torch,symm_mem",
    "FSDP2, DDP": "-m +experiment=fsdp_overlap model=llama3_8b distributed.dp_size=4",
    "TP stacks": "-m +experiment=tp_training model=llama3_8b tp_size=2,4 dp_size=1",
    "Your training": "-m workload=job job.command='torchrun train.py --bucket {mb}' +job.values.mb=25,100",
}
EXAMPLE_OF = {
    **{"operator": EXAMPLES["A sweep"], "kernel": EXAMPLES["Kernels"], "fsdp": EXAMPLES["FSDP2, DDP"]},
    **{"tp_training": EXAMPLES["TP stacks"], "job": EXAMPLES["Your training"]},
    **{"layer": "workload=layer tp_size=4 model=llama3_70b", "copy_engine": "workload=copy_engine"},
}
"""An example by workload, of those that come with the product."""
OF_TUNER = ("tuner.", "max_tp_size")
"""Beginnings of the options of the tuner, which is for workload=operator."""
MORE = {
    "workload=fsdp --help": "options of a workload, with values and explanations",
    "hydra/launcher=slurm --help": "options of a launcher or sweeper",
    "--cfg job workload=fsdp": "the resulting configuration",
    "--hydra-help": "Hydra's own flags, such as shell completion",
}


@dataclass(frozen=True)
class Page:
    """A section of the help: options under one title."""

    title: str
    about: str
    options: Sequence[Option]


def choices(loader: ConfigLoader, group: str) -> list[str]:
    """Returns the choices of a config group, numbers in their order, the rest in Hydra's."""
    names = (name for name in loader.get_group_options(group, ObjectType.CONFIG) if not name.startswith("_"))
    return sorted(names, key=lambda name: int(name) if name.isdigit() else 0)


def sentences(loader: ConfigLoader, group: str) -> dict[str, str]:
    """Returns the sentence of each choice of a config group whose file has one: the comment below its package."""
    folders = [Path(source.path) / group for source in loader.get_sources() if source.scheme() == "file"]
    found = {}
    for choice in choices(loader, group):
        file = next((path for folder in folders if (path := folder / f"{choice}.yaml").is_file()), None)
        comments = [line[2:] for line in file.read_text().splitlines() if line.startswith("# ")] if file else []
        if comments[1:] and comments[0].startswith("@package"):
            found[choice] = comments[1]
    return found


def workload_pages(name: str) -> list[Page]:
    """Returns a workload's options: its own first, those of all workloads last."""
    sections = sections_of(SCHEMAS[name])
    own_first = sorted(sections, key=lambda each: len(workloads_with_section(each)))
    return [section_page(each, sections[each]) for each in own_first]


def section_page(section: type, options: Sequence[Option]) -> Page:
    """Returns the page of a dataclass's options, which have a common parent or are top-level."""
    parent = options[0].name.rpartition(".")[0].partition(".")[0]
    if parent:
        return Page(parent, about(section), options)
    users = workloads_with_section(section)
    owner = "every workload" if users == tuple(SCHEMAS) else f"workload={listed(users)}"
    return Page(f"Options of {owner}", "", options)


def launcher_page(name: str, schema: type) -> Page:
    """Returns a launcher's options, named hydra.launcher.*."""
    options = [
        replace(option, name=f"hydra.launcher.{option.name}", about=option.about or ABOUT_SUBMITIT.get(option.name, ""))
        for option in options_of(schema)
        if option.name != "_target_"
    ]
    return Page(f"hydra/launcher={name}", about(schema), options)


def sweeper_page(name: str, schema: type) -> Page:
    """Returns the options of the points' schema that a sweeper reads."""
    found = SWEEPERS.get(name)
    options = [option for option in options_of(schema) if found and option.name.startswith(found.options)]
    return Page(f"hydra/sweeper={name}", found.about if found else "", options)


def help_text(config: DictConfig) -> str:
    """Returns the help for the configuration's command line, as a template for Hydra."""
    overrides = [str(override) for override in (*config.hydra.overrides.task, *config.hydra.overrides.hydra)]
    chosen = {override.lstrip("+~").partition("=")[0] for override in overrides}
    return "\n".join(_chosen(config, chosen) if chosen else _front()).replace("$", "$$")


def _front() -> Iterator[str]:
    hydra, program = GlobalHydra.instance().hydra, launch_program()
    assert hydra is not None
    yield "overlap_sweep measures how a model's communication overlaps with its GEMMs, in tensor and data parallelism."
    yield ""
    yield from (f"{title:<16}  {program} {arguments}" for title, arguments in EXAMPLES.items())
    yield f"{'Then analyse':<16}  {analyze_program()} multirun/<date>"
    yield ""
    yield "Choose with group=name, an experiment with +experiment=name:"
    for group in GROUPS:
        names = ", ".join([*choices(hydra.config_loader, group), *["or any other number"] * (group in NUMBERED)])
        yield from _wrapped(names, f"  {group:<14}  ", " " * 18)
    yield ""
    yield "Set with option=value. With -m, option=1,2,4 sweeps over all combinations of values. More help:"
    yield from (f"  {f'{program} {arguments}':<50}  {about}" for arguments, about in MORE.items())
    yield f"  {'docs/options.md':<50}  all options"


def _chosen(config: DictConfig, chosen: set[str]) -> Iterator[str]:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    name, selected = config.workload.name, config.hydra.runtime.choices
    launcher, sweeper = selected["hydra/launcher"], selected["hydra/sweeper"]
    pages = []
    if "hydra/launcher" in chosen and launcher in LAUNCHERS:
        pages.append(launcher_page(launcher, type(LAUNCHERS[launcher])))
    if "hydra/sweeper" in chosen or sweeper != "basic":
        pages.append(sweeper_page(sweeper, SCHEMAS[name]))
    if chosen - {"hydra/launcher", "hydra/sweeper"}:
        if name in EXAMPLE_OF:
            yield f"Example: {launch_program()} {EXAMPLE_OF[name]}"
            yield ""
        yield f"Options of workload={name}: value with this command line, allowed values"
        pages += sorted(workload_pages(name), key=lambda page: page.title not in chosen)
    for page in pages:
        options = [one for one in page.options if name == "operator" or not one.name.startswith(OF_TUNER)]
        if page.options and not options:
            continue
        yield ""
        yield from _wrapped(": ".join(filter(None, (page.title, page.about))))
        for option in options:
            typed = f"{option.name}={_value(config, option)}"
            yield from _wrapped(f"{typed:<44}  {option.values}", "  ", " " * 48)
            yield from _wrapped(option.about, " " * 6, " " * 6)
            for choice, sentence in (
                sentences(hydra.config_loader, option.name) if option.name in GROUPS else {}
            ).items():
                yield from _wrapped(f"{choice}: {sentence}", " " * 8, " " * 10)
        if page.title == f"hydra/sweeper={sweeper}" and (swept := config.hydra.sweeper.get("params")):
            yield "  Swept by default:"
            yield from (f"  {key}={value}" for key, value in swept.items())


def _value(config: DictConfig, option: Option) -> str:
    if option.name.startswith("hydra."):
        # Shown unresolved, since it is resolved for every point.
        return shown(OmegaConf.to_container(config.hydra.launcher)[option.name.rpartition(".")[2]])  # type: ignore[index,call-overload]
    value: Any = OmegaConf.select(config, option.name, default="")
    return shown(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 50)).columns)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


_COMMANDS = re.compile(r"\s*(?:\S*/)?overlap-sweep\s+(?:launch|tune)\s")
"""Start of a command line that is not `python launch.py`."""


def complete(plugin: CompletionPlugin, config_name: str | None) -> None:
    """Prints the completions of the shell's command line; replaces `query` of Hydra's plugin."""
    line = os.environ["COMP_LINE"]
    named = _COMMANDS.match(line)
    arguments = line[named.end() :] if named else plugin.strip_python_or_app_name(line)
    try:
        words, word = shlex.split(arguments), ""
    except ValueError:
        # Inside of quotes.
        return
    if words and not arguments.endswith(" "):
        word = words.pop()
    words = flags_first(quoted_for_hydra(words))
    # Hydra splits the line again.
    line = " ".join([*(each for each in words if " " not in each), word])
    found = _completed_values(plugin.config_loader, word) or plugin._query(config_name, line)
    print(" ".join(one for one in found if not one.startswith(tuple(NOT_GIVEN))))


def _completed_values(loader: ConfigLoader, word: str) -> list[str]:
    """Returns the word completed by each value of its option, after the values that it lists already."""
    key, equals, begun = word.partition("=")
    if not equals:
        return []
    *before, last = begun.rpartition(",")
    name = key.lstrip("+")
    option = option_named(name)
    values = choices(loader, name) if name in GROUPS else option.choices if option else ()
    return [f"{key}={''.join(before)}{value}" for value in values if value.startswith(last)]
