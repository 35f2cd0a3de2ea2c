"""Which points of every workload are refused and why, and what those that are not are called and are given.

Every point of the sweeps in refusals.txt is a line of the golden file. Beside configuration a point may say what is
`installed`, for which `cuda`, and what `slots` and `switches` a file holds.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from overlap_sweep import workloads
from overlap_sweep.backends import installed as libraries
from overlap_sweep.backends import transformer_engine
from overlap_sweep.config import NO_PART_OF_A_POINT, PRECISIONS, PointConfig, ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.registry import decoded_point, types_of
from overlap_sweep.runtime.resolvers import point_name
from overlap_sweep.workloads import layer as layer_variants
from overlap_sweep.workloads.layer import moe
from tests.composed import TINY_FSDP, TINY_MODEL, TINY_OPTIONS, composed
from tests.make_point import gpu_point, kernel_point, layer_point, resolved

Point = dict[str, Any]
PACKAGES = ("transformer_engine", "megatron", "megatron.core", "deepspeed", "flash_attn", "flux")
SWEEPS = Path(__file__).with_suffix(".txt")


def grids() -> dict[str, list[str]]:
    """Returns the lines of SWEEPS by workload, those of [names] too, with their names replaced; of [job], which is the
    last, as they are."""
    variants = (f"[{name}]" for name in layer_variants.PRESETS)
    known = {
        "precisions": [",".join(PRECISIONS)],
        "kinds": [f"layer.kind={','.join(space.LAYER_KINDS)}"],
        "presets": [f"layer.variants={','.join(variants)}"],
    }
    found: dict[str, list[str]] = {}
    for line in SWEEPS.read_text().splitlines():
        name, _, value = line.removeprefix("$").partition(" = ")
        if line.startswith("["):
            own, lines = dict(known), found.setdefault(line[1:-1], [])
        elif value:
            (own if found else known).setdefault(name, []).extend(_replaced(value, own if found else known))
        elif line and not line.startswith("#"):
            lines += [line] if "job" in found else _replaced(line, own)
    return found


def _replaced(line: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    name = re.search(r"\$(\w+)", line)
    if name is None:
        return [line]
    return [each for value in values[name[1]] for each in _replaced(line.replace(name[0], value, 1), values)]


def write(folder: Path) -> None:
    """Writes a file for each workload, and one of the names and settings of operators."""
    folder.mkdir()
    with machine():
        for name, lines in grids().items():
            points = [point for line in lines for point in _points(name, line)]
            answers = (described(point) if name == "names" else said(name, point) for point in points)
            text = (f"{' '.join(point)} -> {answer}\n" for point, answer in zip(points, answers, strict=True))
            (folder / f"{name}.txt").write_text("".join(text))


def _points(name: str, line: str) -> Iterable[tuple[str, ...]]:
    # A job's line is one point: it has blanks, quotes and dollars.
    return [tuple(shlex.split(line))] if name == "job" else product(*map(_choices, line.split()))


@cache
def _choices(text: str) -> tuple[str, ...]:
    override = OverridesParser.create().parse_override(text)
    if not override.is_sweep_override():
        return (text,)
    return tuple(f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())


@cache
def _value(text: str) -> Any:
    return OverridesParser.create().parse_override(text).value()


def said(workload: str, overrides: Sequence[str]) -> str:
    """Returns the reason or the user's error, or that it is ok, with what will be run."""
    here = [text for text in overrides if not text.startswith(("installed=", "cuda="))]
    given = {text.partition("=")[0]: _value(text) for text in overrides if text not in here}
    with machine(**given) if given else nullcontext():
        try:
            point = _point(workload, here)
            reason = workloads.of(point).refusal(point)
        except UserError as error:
            return f"error: {error}"
        return f"refused: {reason}" if reason else f"ok: {_runs(workload, point)}"


@contextmanager
def machine(installed: Sequence[str] = PACKAGES, cuda: int | None = 12) -> Iterator[None]:
    """Has this process have these packages, for this CUDA, and eight GPUs."""
    no_flux = None if "flux" in installed else "Flux is not installed"

    def has(package: str) -> str | None:
        return package if package in installed else None

    libraries.missing.cache_clear()
    with (
        mock.patch.object(libraries, "find_spec", has),
        mock.patch("overlap_sweep.workloads.tp_training.find_spec", has),
        mock.patch.object(transformer_engine, "cuda_major", return_value=cuda),
        mock.patch("overlap_sweep.backends.flux.missing", return_value=no_flux),
        mock.patch("overlap_sweep.runtime.point.visible_gpus", return_value=8),
    ):
        try:
            yield
        finally:
            libraries.missing.cache_clear()


def _runs(workload: str, point: Point) -> str:
    if workload == "kernel":
        return f"{workloads.load(workload).subject(point)} by {point['backend']}'s {' '.join(point['implementations'])}"
    if workload == "moe":
        return " ".join(moe.names(point))
    if workload == "layer":
        configs = workloads.load("layer").overlap_configs(point)
        names = [name for name in layer_variants.names(point) if name in ("none", "floor", *configs)]
        return f"{' '.join(names)} by {point['backend']}"
    return _size(point)


def described(overrides: Sequence[str]) -> str:
    """Returns a point's name, subject and ranks; of an operator also settings, the passes it is about and tolerance."""
    workload = overrides[0].partition("=")[2] if overrides[0].startswith("workload=") else "operator"
    changes = [text for text in overrides if not text.startswith(("workload=", "model=", "layer=", "+", "hydra."))]
    asked = _changed(ASKED[workload](), changes)
    # Every configuration that Hydra composes has a method.
    kind = types_of(workload).resolved if workload in ("operator", "layer") else workloads.schema(workload)
    named = OmegaConf.create({"method": "none", **asked})
    config = msgspec.convert({"method": "none", **asked, "workload": ASKED[workload]()["workload"]}, kind)
    found = f"{point_name(named, [*overrides])}: {_size(config)}"
    if workload != "operator":
        return found
    point = _completed(asked)
    settings = space.settings(point)
    given = ", ".join(f"{slot} {space.setting_name(setting)}" for slot, setting in settings.items())
    about = f"{'+'.join(space.passes(point))} within {space.tolerance(point):g}"
    return f"{found}; {given or 'no overlap'}; {space.settings_name(settings)}; {about}"


def _size(point: PointConfig) -> str:
    return f"{workloads.of(point).subject(point)} on {point.world_size} ranks of {workloads.gpus(point)} GPUs"


def _point(workload: str, overrides: Sequence[str]) -> Point:
    if workload in COMPOSED:
        return composed(*COMPOSED[workload], *overrides)
    point = _changed(ASKED[workload](), overrides)
    if "slots" in point:
        comments = "".join(f"# {name}: {str(on).lower()}\n" for name, on in (point.pop("switches", None) or {}).items())
        Path("cfg.yaml").write_text(comments + yaml.safe_dump(point.pop("slots")))
        point["layer"] = {**point["layer"], "variants": ["file:cfg.yaml"]}
    return _completed(point)


def _completed(point: Point) -> ResolvedPoint:
    name = point["workload"]["name"]
    asked: Any = ASKED[name]()
    if name in ("operator", "layer"):
        asked = types_of(name).asked(**vars(asked))
    # Not decoded: also what is out of range is completed.
    for key, value in point.items():
        setattr(asked, key, _changed_part(getattr(asked, key, None), value))
    return decoded_point(workloads.load(name).complete(asked))


def _changed_part(own: Any, value: Any) -> Any:
    if not is_dataclass(own) or isinstance(own, type):
        return value
    return replace(own, **{name: _changed_part(getattr(own, name), each) for name, each in value.items()})


def _changed(point: Mapping[str, Any], overrides: Sequence[str]) -> Point:
    changed, hidden = dict(point), getattr(point, "not_recorded", NO_PART_OF_A_POINT)
    for override in overrides:
        key, _, name = override.partition("=")[0].partition(".")
        changed[key] = {**changed[key], name: _value(override)} if name and key in changed else _value(override)
    return {name: value for name, value in changed.items() if name not in hidden}


ASKED: dict[str, Callable[[], Point]] = {
    **{name: partial(resolved, name) for name in ("fsdp", "copy_engine", "tp_training")},
    **{"operator": gpu_point, "layer": layer_point, "kernel": kernel_point},
}
COMPOSED = {
    **{"fsdp": TINY_FSDP, "copy_engine": ("workload=copy_engine",), "tp_training": (*TINY_OPTIONS, *TINY_MODEL)},
    "job": ("workload=job", "runtime.device=cpu", "job.command=python t.py"),
    "moe": ("workload=layer", "layer=moe", "model=qwen3_moe_tiny", "runtime.device=cpu", "workload.tokens=32"),
}
