"""Kernels of another package, through launch.py: the example of docs/kernels.md, and packages that go wrong."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from overlap_sweep.backends import KERNELS_GROUP, load_kernels
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import BASELINES
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.kernel.result import KernelTimes
from tests.sweeps import ROOT, Launch

SMALL = ("workload=kernel", "m=64", "n=96", "k=64", "tp_size=2", "iters=3", "runtime.device=cpu", "profile=none")
OTHERS = {
    "broken": "import a_library_that_nobody_has\n",
    "misspelt": "def refusal(point:\n",
    "raising": "raise RuntimeError('no licence\\nhere')\n",
    "unfinished": "from mine.kernels import implementations, named, refusal\n",
    "shy": """
from mine.kernels import close, implementations, named, refusal
from overlap_sweep.errors import Refused

def build(point, setting, problem, ranks):
    raise Refused("not today")
""",
    "wrong": """
from mine.kernels import build as build_right, close, implementations, named, refusal

def build(point, setting, problem, ranks):
    call = build_right(point, setting, problem, ranks)
    return lambda at: call(at)._replace(output=call(at).output * 1.01)
""",
    "half_wrong": """
import wrong
from mine.kernels import build as build_right, close, implementations, named, refusal

def build(point, setting, problem, ranks):
    return (wrong.build if setting["num_splits"] == 4 else build_right)(point, setting, problem, ranks)
""",
}


def fenced(language: str) -> str:
    """The only block in that language of the document's section."""
    document = (ROOT / "docs" / "kernels.md").read_text()
    section = document.partition("\n## Your own implementation\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (block,) = [text for of_language, text in blocks if of_language == language]
    return str(block)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: the document's package as its pyproject.toml says, and one with all the others."""
    folder = tmp_path_factory.mktemp("site-packages")
    project = tomllib.loads(fenced("toml"))["project"]
    entries = project["entry-points"][KERNELS_GROUP]
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "kernels.py").write_text(fenced("python"))
    for name, code in OTHERS.items():
        (folder / f"{name}.py").write_text(code)
    for name, version, points in (
        (project["name"], project["version"], entries),
        ("others", "1", {name: name for name in OTHERS}),
    ):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"[{KERNELS_GROUP}]", *(f"{left} = {right}" for left, right in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def launched(
    packages: Path, directory: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Result]]:
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    launch = Launch(directory, {"PYTHONPATH": path})
    return launch.run(*arguments), launch.results()


@pytest.mark.end_to_end
def test_the_documents_example_is_measured_as_it_stands(packages: Path, tmp_path: Path) -> None:
    install, command = fenced("").splitlines()
    assert install.startswith("pip install")
    assert command.startswith("python launch.py ")
    process, results = launched(packages, tmp_path, *command.split()[2:], "iters=3", "profile=none")
    assert process.returncode == 0, process.stderr
    assert len(results) == 4
    assert {result.status for result in results.values()} == {"ok"}
    ours = [result for result in results.values() if result.recorded["backend"] == "mine"]
    assert {result.recorded["kernel"] for result in ours} == {"ag_gemm", "gemm_rs"}
    for result in ours:
        assert set(result.measured.implementations) == {*BASELINES, "pipeline_split2", "pipeline_split4"}
        one = result.measured.implementations["pipeline_split4"]
        assert one.setting == {"method": "pipeline", "num_splits": 4}
        assert one.relative_error is not None
        assert one.relative_error < 1e-5
        assert not one.independent
        assert result.measured.left_out == {}


@pytest.mark.end_to_end
def test_a_name_of_the_users_is_asked_of_the_package(packages: Path, tmp_path: Path) -> None:
    names = "implementations=[pipeline_split8,pipeline_split64]"
    process, results = launched(packages, tmp_path, *SMALL, "backend=mine", "kernel=gemm_rs", names)
    assert process.returncode == 0, process.stderr
    (result,) = results.values()
    assert set(result.measured.implementations) == {*BASELINES, "pipeline_split8"}
    assert result.measured.left_out == {"pipeline_split64": "32 rows of a rank cannot be cut into 64 equal pieces"}


@pytest.mark.end_to_end
def test_what_a_package_refuses_or_computes_wrong_is_skipped_failed_or_left_out(packages: Path, tmp_path: Path) -> None:
    asked = ("backend=mine,shy,wrong,half_wrong", "kernel=ag_gemm,gemm_ar")
    process, results = launched(packages, tmp_path, "-m", *SMALL, *asked)
    assert process.returncode == 1
    assert "Traceback" not in process.stdout + process.stderr
    found = {(result.recorded["backend"], result.recorded["kernel"]): result for result in results.values()}
    unknown = found["mine", "gemm_ar"]
    assert (unknown.status, unknown.error) == ("skipped", "backend=mine has no gemm_ar in fp32")
    shy = found["shy", "ag_gemm"]
    assert (shy.status, shy.error) == ("skipped", "pipeline_split2: not today; pipeline_split4: not today")
    wrong = found["wrong", "ag_gemm"]
    assert (wrong.status, wrong.measured) == ("failed", None)
    assert "pipeline_split2: wrong numbers: relative error 0.0" in str(wrong.error)
    half_wrong = found["half_wrong", "ag_gemm"]
    assert half_wrong.status == "ok"
    assert set(half_wrong.measured_as(KernelTimes).implementations) == {*BASELINES, "pipeline_split2"}
    assert (
        half_wrong.measured_as(KernelTimes).left_out["pipeline_split4"].startswith("wrong numbers: relative error 0.0")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "broken cannot be loaded from broken (ModuleNotFoundError: No module named 'a_library_that"),
        ("misspelt", "misspelt cannot be loaded from misspelt (SyntaxError: "),
        ("raising", "raising cannot be loaded from raising (RuntimeError: no licence); fix or uninstall it."),
        ("unfinished", "unfinished: unfinished has no build, close; docs/kernels.md lists what it requires."),
    ],
)
def test_a_package_that_cannot_be_used_is_one_line(
    packages: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(packages))
    with pytest.raises(UserError) as error:
        load_kernels(name)
    assert str(error.value).startswith(f"backend={said}")
    assert "\n" not in str(error.value)
