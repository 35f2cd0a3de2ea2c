"""What is written from declarations: conf/workload/*.yaml and conf/every_workload.yaml, every option with its default.

By hand are a file's head with its defaults list, interpolations, and keys of maps, such as those of distributed.env.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep import workloads
from overlap_sweep.config import PointConfig
from overlap_sweep.hydra_adapter.overrides import GROUPS, workloads_with_section
from overlap_sweep.options import Option, about, options_of
from tests.sweeps import ROOT

CONF = ROOT / "conf"
EVERY_WORKLOAD = CONF / "every_workload.yaml"
WIDTH = 120
_BY_GROUPS = (*(f"{group}." for group in ("model", "model_preset")), "layer.kind")
"""Options that a group sets without having their name."""


def files() -> dict[Path, str]:
    """Returns the text of each file, by path."""
    found = {EVERY_WORKLOAD: _written(EVERY_WORKLOAD, PointConfig, _of_every_workload())}
    for name in workloads.BUILT_IN:
        path, schema = CONF / "workload" / f"{name}.yaml", workloads.schema(name)
        shared = {option.name for option in _of_every_workload()}
        found[path] = _written(path, schema, [each for each in options_of(schema) if each.name not in shared])
    return found


def _of_every_workload() -> list[Option]:
    schema = workloads.schema("job")
    return [option for option in options_of(schema) if workloads_with_section(option.section) == workloads.names()]


def _written(path: Path, schema: Any, options: Sequence[Option]) -> str:
    text = path.read_text()
    head = re.match(r"(?:#.*\n|defaults:\n|  - .*\n)*", text)
    assert head
    given = yaml.safe_load(text)
    lines, parents = [head[0].rstrip("\n"), ""], list[str]()
    for option in options:
        if option.name in GROUPS or option.name.startswith(_BY_GROUPS):
            continue
        *above, _ = option.name.split(".")
        for depth, parent in enumerate(above):
            if above[: depth + 1] != parents[: depth + 1]:
                sentence = _sentences(about(type(reduce(getattr, above[: depth + 1], schema()))))[0]
                lines += [*_blank(lines, depth), *_comment(sentence, depth), f"{'  ' * depth}{parent}:"]
        lines += _blank(lines, 0) if parents and not above else []
        parents = above
        lines += _lines(option, schema, given)
    return "\n".join(lines) + "\n"


def _blank(lines: Sequence[str], depth: int) -> list[str]:
    return [""] if lines[-1] and not depth else []


def _lines(option: Option, schema: Any, given: Mapping[str, Any]) -> Iterator[str]:
    *above, key = option.name.split(".")
    depth = len(above)
    yield from _comment(_short(option), depth)
    here: Any = reduce(lambda node, name: (node or {}).get(name), option.name.split("."), given)
    declared = reduce(getattr, option.name.split("."), schema())
    if option.is_map and here:
        yield f"{'  ' * depth}{key}:"
        yield from (f"{'  ' * (depth + 1)}{name}: {_scalar(value)}" for name, value in here.items())
    else:
        value = here if isinstance(here, str) and here.startswith("${") else declared
        values = f"  # {option.values}" if option.values else ""
        yield f"{'  ' * depth}{key}: {_scalar(value)}{values}"


def _short(option: Option) -> str:
    """Returns the option's first sentence, and what null stands for if that is the default."""
    first, *rest = _sentences(option.about)
    of_null = [sentence for sentence in rest if sentence.startswith("null:") and option.default == "null"]
    return " ".join([first, *of_null])


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) (?=[A-Z`]|null:|false:|true:|0:)", text)


def _comment(text: str, depth: int) -> list[str]:
    start = f"{'  ' * depth}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _scalar(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("...\n").strip()
