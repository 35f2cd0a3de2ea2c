"""From the configured command to the one that is run: its words, its environment, and the files that it depends on."""

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePath

from overlap_sweep import levers
from overlap_sweep.config import Runtime
from overlap_sweep.errors import UserError
from overlap_sweep.levers import programs, shells
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.recorder.recording import RECORD_VARIABLE
from overlap_sweep.results.identity import NO_MULTICAST
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.run_directory import settings_file
from overlap_sweep.workloads.job import lever_values, program_options
from overlap_sweep.workloads.job.config import Config, Job, Resolved
from overlap_sweep.workloads.job.output import AMOUNTS, check_metric
from overlap_sweep.workloads.job.template import Filling, filled, placeholders, split

_TEMPLATES = ("command", "directory", *AMOUNTS)
OWN = ("ranks", "repetition", "run", "nodes", "ranks_per_node", "node", "host", "port")
"""Placeholders that are no values."""
_INSTEAD = {"ranks": "set job.ranks", "repetition": "set repetition", "nodes": "set runtime.nodes"}
_MEGATRON = ":megatron"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_WORK = 1e18
_WHOLE_BYTES = 2**26
"""Largest file whose content makes a point another one; of a larger one it is size and time of change."""


@dataclass(frozen=True)
class Place:
    """Node on which a command is started, as its placeholders say it."""

    node: int | str = 0
    host: str = "localhost"
    """Address of the first node."""
    port: int | str = 29500
    """Free port of the first node."""


ALONE = Place()
"""Place in whose words commands are checked and compared: host and port make no other point."""


def complete(config: Config) -> dict[str, object]:
    """Returns the point with the contents of its files, without unused options. UserError if it makes no sense."""
    if config.backend != "auto":
        raise UserError(f"backend={config.backend}: workload=job has no backends; leave it out.")
    _check_names(config)
    lever_values.check(config)
    check_metric(config.job)
    overlap, run = _overlap_config(config), Path("run")
    arguments(config, run)
    environment(config, run)
    working_folder(config, run)
    for option in AMOUNTS:
        amount(config, option)
    job = asdict(config.job) | {"levers": lever_values.by_family(config.job.levers), "files": _files(config)}
    if config.profile == "none":
        job |= {"profile_steps": 0}
    return {**as_measured(config), "job": job, "overlap_cfg": overlap}


def refusal(point: Resolved) -> str | None:
    """Returns which option of a completed point has no effect, or why its file cannot be used; None if it is valid."""
    job, runtime = point.job, point.runtime
    used = set().union(*map(placeholders, _templates(job)))
    for name in job.values:
        if not used & {name, name + _MEGATRON}:
            return f"job.values.{name} has no effect: there is no placeholder {{{name}}}"
    if point.nodes > 1 and not used & {"node", "host"}:
        return (
            f"job.command has neither {{node}} nor {{host}}, so each of runtime.nodes={point.nodes} would train "
            "on its own; give torchrun --nnodes={nodes} --node-rank={node} --master-addr={host} --master-port={port}"
        )
    if job.metric is None and job.metric_is != "rate":
        return "job.metric_is has no effect without job.metric"
    if runtime.device == "cpu" and (needing := levers.needing_gpus(levers.chosen(job.levers))):
        return f"job.levers.{needing[0]} has a meaning on GPUs only"
    if misfits := levers.misfits(levers.chosen(job.levers)):
        return misfits
    if runtime.threads_per_rank != 1:
        return "runtime.threads_per_rank has no effect on a command; give +job.env.OMP_NUM_THREADS=..."
    words = _own_words(point, Path("run"))
    if of_levers := program_options.refusal(point, words, _program_texts(point, words)):
        return of_levers
    if config := point.overlap_cfg:
        if reason := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config):
            return reason
        if lacking := overlap_cfg.switches_without_flag(config):
            listed = ", ".join(f"{name}={on}" for name, on in lacking.items())
            return f"Megatron-LM has no argument for {listed}; set it in its TransformerConfig"
    return None


def arguments(point: Config, directory: Path, place: Place = ALONE) -> list[str]:
    """Returns the words of the command, filled in, with the options of levers. UserError if it cannot be understood."""
    folder, words = handed(directory), _own_words(point, directory, place)
    changes = program_options.changes(point, str(folder / settings_file()))
    return shells.changed(words, changes.values(), str(folder / program_options.JSON_FILE))


def _own_words(point: Config, directory: Path, place: Place = ALONE) -> list[str]:
    return split(point.job.command, fillings(point, directory, place), "job.command")


def without_levers(point: Resolved) -> tuple[list[str], dict[str, str]]:
    """Returns the words of the command without options of levers, and the texts of `_program_texts`."""
    words = _own_words(point, Path("run"))
    return words, _program_texts(point, words)


def _program_texts(point: Config, words: Sequence[str]) -> dict[str, str]:
    """Returns the texts of the files that say which programs the command starts, and with which options, by name."""
    found = {name: _existing(point, name) for name in programs.files_of(shells.program_words(words))}
    return {name: path.read_text(errors="replace") for name, path in found.items() if path}


def write_files(point: Resolved, directory: Path) -> None:
    """Writes the files that the command is given in place of the user's, with what levers change in them."""
    words = _own_words(point, directory)
    program_options.write_files(point, words, _program_texts(point, words), directory)


def working_folder(point: Config, directory: Path, place: Place = ALONE) -> Path:
    """Returns the folder in which the command is run. Points record it as it was given, relative to where launch.py was
    started: so they are equal wherever the project lies."""
    folder = filled(point.job.directory, fillings(point, directory, place), "job.directory")
    return Path(folder).expanduser().absolute()


def environment(point: Config, directory: Path, place: Place = ALONE) -> dict[str, str]:
    """Returns the variables that the point sets for the command."""
    own = _variables(point.job, fillings(point, directory, place))
    return levers.environment(levers.chosen(point.job.levers)) | own


def _variables(job: Job, texts: Mapping[str, Filling]) -> dict[str, str]:
    return {
        name: filled(in_words(value), texts, f"job.env.{name}") for name, value in job.env.items() if value is not None
    }


def amount(point: Config, option: str) -> float | None:
    """Returns one of AMOUNTS, a product of numbers and placeholders, if given. UserError if it is not positive."""
    template = getattr(point.job, option)
    if template is None:
        return None
    text = filled(str(template), fillings(point, Path("run")), f"job.{option}")
    try:
        product = math.prod(float(factor.replace(",", "")) for factor in text.split("*"))
    except ValueError:
        product = math.nan
    if not 0 < product < _MOST_WORK:
        filled_in = "" if text == str(template) else f", {text},"
        raise UserError(
            f"job.{option}={template}{filled_in} is not an amount of work; give a product of positive numbers, such as "
            "'{batch} * {ranks}'."
        )
    return product


def handed(directory: Path) -> Path:
    """Returns the path of the run directory that the command is given: itself, or a link next to it if its name has
    characters that some programs parse, such as the `=` of `--out_dir=<path>`."""
    path = directory.resolve()
    safe = _UNSAFE.sub("-", path.name)
    if safe == path.name:
        return path
    # Names that differ only in such characters get links of their own.
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:8]
    return path.parent / ".run" / f"{safe}-{digest}"


def link_handed(point: Resolved, directory: Path) -> None:
    """Makes the link that `handed` names, if there is one and the command is given it."""
    link = handed(directory)
    texts = [*arguments(point, directory), *environment(point, directory).values()]
    if not link.exists() and any(str(link) in text for text in (*texts, str(working_folder(point, directory)))):
        link.parent.mkdir(exist_ok=True)
        # Relative, so that a sweep can be moved.
        link.symlink_to(Path("..") / directory.resolve().name)


def fillings(point: Config, directory: Path, place: Place = ALONE) -> dict[str, Filling]:
    job, nodes = point.job, point.nodes
    own = {"ranks": job.ranks, "repetition": point.repetition, "run": handed(directory), **asdict(place)}
    own |= {"nodes": nodes, "ranks_per_node": job.ranks // nodes}
    found = {name: Filling(str(value), (str(value),)) for name, value in own.items()}
    # Earlier results may have values with names that are refused now.
    found |= {name: Filling(in_words(value), tuple(in_words(value).split())) for name, value in job.values.items()}
    for name in _megatron_values(job):
        words = program_options.overlap_words(point, job.values[name], str(handed(directory) / settings_file()))
        found[name + _MEGATRON] = Filling(shlex.join(words), words)
    return found


def in_words(value: Scalar) -> str:
    """Returns a value as it is typed on a command line; null is empty."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _templates(job: Job) -> Iterator[str]:
    yield from (str(text) for name in _TEMPLATES if (text := getattr(job, name)) is not None)
    yield from (in_words(value) for value in job.env.values())


def _megatron_values(job: Job) -> list[str]:
    """Returns the names of the values that Megatron-LM's arguments are made of."""
    used = set().union(*map(placeholders, _templates(job)))
    return [name for name in job.values if name + _MEGATRON in used]


def _overlap_config(config: Config) -> dict[str, object] | None:
    """Returns slots and switches of the tp_comm_overlap_cfg that a value names; None if it names none, or one that
    keeps overlap off. UserError if the file is not one, or there are several values."""
    job = config.job
    given = {f"{{{name}{_MEGATRON}}}": job.values[name] for name in _megatron_values(job)}
    option = (
        f"job.values.{next(iter(given))[1 : -len(_MEGATRON) - 1]}"
        if given
        else f"job.levers.{program_options.OVERLAP_LEVER}"
    )
    given |= {name: value for name, value in levers.flat(job.levers) if name == program_options.OVERLAP_LEVER}
    if len(given) > 1:
        both = " and ".join([*given][:2])
        raise UserError(f"job.command has {both}; Megatron-LM takes one of them.")
    value = in_words(next(iter(given.values()), None))
    if value in ("", overlap_cfg.NONE, overlap_cfg.DEFAULT):
        return None
    path = _existing(config, value)
    if path is None:
        raise UserError(f"{option}={value} is not a file; give none, default or the path of a tp_comm_overlap_cfg.")
    found = overlap_cfg.read(path)
    return asdict(found) if found.switches["tp_comm_overlap"] else None


def _check_names(config: Config) -> None:
    for section, given in (("values", config.job.values), ("env", config.job.env)):
        for name, value in given.items():
            key = f"job.{section}.{name}"
            if section == "values" and name in OWN:
                instead = _INSTEAD.get(name, "choose another name")
                raise UserError(f"{key}: {{{name}}} has a meaning of its own; {instead}.")
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UserError(f"{key}: a name has letters, digits and _, and does not begin with a digit; rename it.")
            if isinstance(value, Mapping):
                raise UserError(f"{key} is not a single value; names below job.{section} have no dots.")
            if isinstance(value, list | tuple):
                raise UserError(f"{key}={list(value)} is not a single value; quote it: +{key}='\"[a,b]\"'.")
    for name in config.job.env:
        if name in NO_MULTICAST:
            raise UserError(f"job.env.{name}: give runtime.multicast=true instead, or leave it out.")
        if name == RECORD_VARIABLE:
            raise UserError(f"job.env.{name} is set by launch.py itself; give job.steps and the like instead.")
        if name == "CUDA_DEVICE_MAX_CONNECTIONS" and config.runtime.max_connections is not None:
            raise UserError(f"job.env.{name} and runtime.max_connections set the same; give one of them.")


def _existing(point: Config, name: str) -> Path | None:
    """Returns the file of that name, relative to the working folder or to where launch.py was started."""
    for folder in (working_folder(point, Path("run")), Path()):
        path = folder / Path(name).expanduser()
        try:
            if path.is_file():
                return path.resolve()
        except (OSError, ValueError):
            # A value that is no path, such as a text longer than names of files.
            return None
    return None


def _files(point: Config) -> dict[str, str]:
    """Returns a digest of the script, and of each file that a value names: a point is another one when they change."""
    values = (value for value in point.job.values.values() if isinstance(value, str))
    script = programs.script_of(shells.program_words(arguments(point, Path("run"))))
    paths = {name: _existing(point, name) for name in (script, *values) if name}
    return {name: _digest(path, path.stat().st_size, path.stat().st_mtime_ns) for name, path in paths.items() if path}


@cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    if size > _WHOLE_BYTES:
        return f"{size} bytes of {changed_ns}"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from None


def as_measured(config: Config) -> dict[str, object]:
    """Returns the composed point with what is the same for every job."""
    model = {"name": script_name(config)}
    return {**config, "model": model, "backend": "job", "precision": None, "tp_size": 1}


def script_name(config: Config) -> str:
    """Returns a short name of what the configured command runs: the script without its folder, or the program. Of any
    configuration, since a run directory gets its name before its options are checked."""
    # By name, since `values` of OmegaConf's mappings is a method.
    given = config["job"]
    job = Job(**{name: given[name] for name in (*_TEMPLATES, "ranks", "values", "env")})
    runtime = Runtime(nodes=config.runtime.nodes)
    try:
        own = arguments(Config(job=job, runtime=runtime, repetition=config.repetition), Path("run"))
        words = [*shells.program_words(own)]
    except UserError:
        # `complete` says so.
        words = str(job.command).split()
    return PurePath(programs.script_of(words) or words[0]).name if words else "job"


def same_point(point: Resolved) -> str:
    """Returns a key that is equal for completed points that run the same."""
    run = Path("run")
    job = {name: value for name, value in asdict(point.job).items() if name not in (*_TEMPLATES, "values", "env")}
    parts = [arguments(point, run), environment(point, run), str(working_folder(point, run))]
    amounts = [amount(point, option) for option in AMOUNTS]
    return json.dumps([*parts, *amounts, {**point, "job": job}], sort_keys=True)


def command_line(point: Resolved) -> str:
    """Returns what a shell runs for this point, without the recorder: folder, environment and command, with its values
    filled in. `{run}` becomes `run`, a folder that is made; on several nodes `{node}`, `{host}` and `{port}` become
    NODE, HOST and PORT. UserError if something has no value."""
    job, connections = point.job, point.runtime.max_connections
    texts = _by_hand(point)
    folder = filled(job.directory, texts, "job.directory")
    first = [] if PurePath(folder) == PurePath() else ["cd", shlex.quote(folder), "&&"]
    if "run" in placeholders(job.directory):
        first = ["mkdir", "-p", shlex.quote(folder), "&&", *first]
        inside = os.path.relpath("run", folder)
        texts |= {"run": Filling(inside, (inside,))}
    elif any("run" in placeholders(one) for one in (job.command, *map(in_words, job.env.values()))):
        first += ["mkdir", "-p", "run", "&&"]
    variables = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    variables |= levers.environment(_known_levers(point)) | _variables(job, texts)
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    words, changes = split(job.command, texts, "job.command"), program_options.changes(point)
    return " ".join([*first, *assigned, shlex.join(shells.changed(words, changes.values()))])


def in_processes(point: Resolved) -> dict[str, levers.Value]:
    """Returns the point's levers that are applied in the training's processes, which the command line lacks."""
    return {name: value for name, value in _known_levers(point).items() if levers.levers()[name].is_in_process}


def in_json(point: Resolved) -> dict[str, levers.Value]:
    """Returns the point's levers that are applied in a copy of DeepSpeed's JSON file, whose own name the command line
    has."""
    return {name: value for name, value in _known_levers(point).items() if levers.levers()[name].program == "deepspeed"}


def json_file(point: Resolved) -> str:
    """Returns the name of DeepSpeed's JSON file in the command."""
    return programs.json_file(split(point.job.command, _by_hand(point), "job.command"))


def to_write(point: Resolved) -> str:
    """Returns the lines for the script, or for DeepSpeed's JSON file, that do what those levers did; empty if there are
    none."""
    lines = levers.written_together(in_processes(point))
    if changed := in_json(point):
        lines.append(programs.json_to_write(programs.change(levers.levers()[name], changed[name]) for name in changed))
    return "\n".join(lines)


def _known_levers(point: Resolved) -> dict[str, levers.Value]:
    """Returns the point's levers without those of packages that are not installed where it is analysed."""
    return {name: value for name, value in levers.flat(point.job.levers) if name in levers.levers()}


def _by_hand(point: Resolved) -> dict[str, Filling]:
    place = Place("NODE", "HOST", "PORT") if point.nodes > 1 else ALONE
    found = fillings(point, Path("run"), place)
    for name in _megatron_values(point.job):
        words = program_options.overlap_words(point, point.job.values[name])
        found[name + _MEGATRON] = Filling(shlex.join(words), words)
    return found | {"run": Filling("run", ("run",)), "repetition": Filling("0", ("0",))}
