"""The commands, options, columns and links of README and docs: each must be one that there is."""

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hydra.core.override_parser.overrides_parser import OverridesParser

from overlap_sweep import workloads
from overlap_sweep.commands.command_line import app
from overlap_sweep.declared import has_key
from overlap_sweep.hydra_adapter.overrides import quoted_for_hydra
from overlap_sweep.runtime import nodes, point
from overlap_sweep.tuner import model_overrides
from tests.composed import configuration
from tests.sweeps import ROOT

PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")})
GENERATED = {"columns.md", "options.md"}
DOORS = ("python launch.py", "python analyze.py", "overlap-sweep")
DECLARED = {"runtime", "workload", "search", "tuner", "layer", "fsdp", "distributed", "streams", "training"}
DECLARED |= {"telemetry", "profiling", "compile", "copy_engine", "ranking", "tp_training", "model", "job"}
ADDED_FREELY = ("distributed.env.", "compile.options.", "job.values.", "job.env.", "job.levers.")
MADE = ROOT / "tests/golden/expected/tuner/optimal_tp_comm_overlap_cfg_tp2.yaml"
FILES = (".csv", ".json", ".yaml", ".py", ".md", ".parquet", ".txt", ".log")
UNUSUAL = "|".join(
    [
        r"says\s+\[?`diagnose`",
        r"\ba training\b(?! (?:run|step|job|program|point|process|loop|command))",
        r"\bmending\b|when it is there|nothing runs [0-9]|looked into|pretended",
    ]
)
"""Word order and words of other languages that engineers stumbled over."""


def blocks(page: Path) -> Iterator[str]:
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if language in ("", "sh", "bash"):
            yield text


def inline(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def commands() -> Iterator[tuple[str, str]]:
    """Each command that a page shows whole, with the page's name."""
    for page in PAGES:
        lines = [line for text in blocks(page) for line in text.replace("\\\n", " ").splitlines()]
        for line in [*lines, *inline(page)]:
            begins = re.match(rf"(\$ )?({'|'.join(map(re.escape, DOORS))}) \S", line)
            if begins and "..." not in line:
                yield page.name, line.removeprefix("$ ")


def words(command: str) -> list[str]:
    """What a shell gives to the program; `<date>` is a word like any other."""
    return shlex.split(re.sub(r"<(\w+)>", r"\1", command), comments=True)


SHOWN = list(dict.fromkeys((name, tuple(words(command))) for name, command in commands()))
EXAMPLE_PACKAGE = "backend=torch,mine"
NOT_COMPOSED = {"--help", "-sc", EXAMPLE_PACKAGE}
LAUNCHES = [
    (name, shown)
    for name, shown in SHOWN
    if shown[1] in ("launch.py", "launch", "tune") and shown[2:] and not NOT_COMPOSED & {*shown}
]
ANALYSES = [(name, shown) for name, shown in SHOWN if shown[1] in ("analyze.py", "analyze") and shown[2:]]


def test_pages_show_commands_of_each_kind() -> None:
    assert len(LAUNCHES) > 30
    assert len(ANALYSES) > 10
    assert {name for name, _ in SHOWN} >= {"README.md", "tuning.md", "sweeps.md", "layers.md", "kernels.md", "fsdp.md"}


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the files that commands name, and two machines of eight GPUs."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "multirun" / "date").mkdir(parents=True)
    for name in ("", "_tp2", "_tp8"):
        for where in (folder, folder / "multirun/date"):
            shutil.copy(MADE, where / f"optimal_tp_comm_overlap_cfg{name}.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(point, "visible_gpus", lambda: 8)
        patch.setattr(nodes, "nodes_here", lambda: 2)
        # Profilers that start the workers need not be installed.
        patch.setattr(point, "check_wrapper", lambda _: None)
        yield


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(("page", "shown"), LAUNCHES)
def test_launch_commands_compose(page: str, shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [word for word in shown[2:] if not word.startswith("-") and word != "resume=last"]
    if shown[1] == "tune":
        arguments = ["+experiment=tp_overlap_tuner", *model_overrides(arguments[0]), *arguments[1:]]
    assert resolved(arguments, monkeypatch) <= {*workloads.names()}


SCRIPTS = {
    "tuner": {"operator"},
    "userbuffers": {"operator", "layer"},
    "moe": {"layer"},
    "kernel": {"kernel"},
    "fsdp": {"fsdp", "copy_engine"},
    "tp_training": {"tp_training", "operator"},
    "levers": {"job"},
}
"""By its name before _results.sh, which workloads the script in benchmarks launches."""


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*_results.sh")), ids=lambda path: path.name)
def test_scripts_of_results_compose(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launched_by(script, tmp_path)
    monkeypatch.chdir(ROOT)
    found = (resolved(arguments, monkeypatch, ends=(-1,)) for arguments in launches)
    assert set[str]().union(*found) == SCRIPTS[script.name.removesuffix("_results.sh")]


LAUNCH = """#!/bin/bash
[ "$1" = launch.py ] || exit 0
printf '%s\\0' "${@:3}" >> SAID
echo >> SAID
for word; do
  [[ $word == hydra.sweep.dir=* ]] && mkdir -p "${word#*=}" && cp MADE "${word#*=}/optimal_tp_comm_overlap_cfg.yaml" &&
    cp MADE "${word#*=}/optimal_tp_comm_overlap_cfg_tp8.yaml"
done
"""
"""Stands for `python3`: writes arguments down, and leaves the files of a tuner."""


def launched_by(script: Path, folder: Path) -> list[list[str]]:
    """The arguments of each `launch.py -m` that the script would run on eight ranks."""
    launch = LAUNCH.replace("SAID", str(folder / "said")).replace("MADE", str(MADE))
    programs = {"python3": launch, "timeout": '#!/bin/bash\nshift\nexec "$@"\n', "torchrun": "#!/bin/bash\n"}
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([script, folder / "out", "8"], env=environment, check=False, timeout=60)
    return [line.rstrip("\0").split("\0") for line in (folder / "said").read_text().splitlines()]


def resolved(arguments: list[str], monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...] = (0, -1)) -> set[str]:
    """The workloads of a launch, whose first and last points compose and are complete; none of a model that a network
    would be asked for."""
    found = set()
    on_slurm = "hydra/launcher=slurm" in arguments
    parsed = OverridesParser.create().parse_overrides(quoted_for_hydra(arguments))
    given = {one.input_line: list(one.sweep_string_iterator()) if one.is_sweep_override() else [] for one in parsed}
    for each in ends if any(given.values()) else (0,):
        config = configuration(
            *(f"{line.partition('=')[0]}={values[each]}" if values else line for line, values in given.items())
        )
        if on_slurm:
            # As in a launch, where the launcher's options decide on how many machines a point is.
            hydra = SimpleNamespace(initialized=lambda: True, instance=lambda cfg=config: SimpleNamespace(cfg=cfg))
            monkeypatch.setattr(nodes, "HydraConfig", hydra)
        if config.get("model", {}).get("source") != "hf":
            found.add(point.resolve(config)["workload"]["name"])
    return found


@pytest.mark.parametrize(("page", "shown"), ANALYSES)
def test_analysis_commands_have_their_options_and_columns(page: str, shown: tuple[str, ...]) -> None:
    group = typer.main.get_command(app)
    arguments = [*shown[2:]]
    with group.make_context("analyze.py", arguments.copy()) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
        assert command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            conditions = [parsed.params.get("expression"), *(parsed.params.get("fail_if") or ())]
    columns = {*re.findall(r"^\| `(\w+)`", (ROOT / "docs/columns.md").read_text(), re.MULTILINE)}
    for condition in filter(None, conditions):
        assert {node.id for node in ast.walk(ast.parse(condition)) if isinstance(node, ast.Name)} <= columns


def test_options_in_the_text_are_declared() -> None:
    schemas = [workloads.schema(name) for name in workloads.names()]
    unknown = [
        (page.name, code)
        for page in PAGES
        if page.name not in GENERATED
        for code in inline(page)
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(=.*)?", code)
        and code.partition(".")[0] in DECLARED
        and not code.startswith(ADDED_FREELY)
        and not code.endswith(FILES)
        and not any(has_key(schema, code.partition("=")[0]) for schema in schemas)
    ]
    assert unknown == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_from_the_top_lead_somewhere(page: str) -> None:
    """Those between pages of docs/ are checked by `make docs`."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_fits_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("page", "case"), [("README.md", "tuner"), ("docs/analysis.md", "operators")])
def test_an_answer_that_is_shown_was_recorded(page: str, case: str) -> None:
    recorded = (ROOT / "tests/golden/expected" / case / "summary.txt").read_text().splitlines()
    (shown,) = [text for text in blocks(ROOT / page) if text.startswith("llama3_8b, 8192 tokens")]
    assert [line for line in shown.splitlines() if line not in (*recorded, "...")] == []


def test_texts_have_none_of_the_expressions_that_readers_stumbled_over() -> None:
    sources = [path for path in (ROOT / "overlap_sweep").rglob("*.py") if path.name in ("config.py", "advice.py")]
    sources += [*(ROOT / "overlap_sweep/report").rglob("*.py"), *(ROOT / "overlap_sweep/workloads/job").glob("*.py")]
    pages = [page for page in PAGES if page.name not in GENERATED]
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*sources, *pages)
        for match in re.finditer(UNUSUAL, path.read_text())
    }
    assert not found
