"""Levers that another package brings: listed, applied, and refused in one line where its file is wrong."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sweeps import ROOT, Launch

PAGE = (ROOT / "docs/levers.md").read_text()
(ENTRY,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PRINTS = """\
import os, time
for _ in range(12):
    time.sleep(0.01)
    print("tps:", os.environ.get("MINE_CHUNK_MB", 9), flush=True)
"""
JOB = ("workload=job", "runtime.device=cpu", "runtime.retries=0", "job.attach=false", "job.finish=true", "profile=none")
METRIC = (r"job.metric=tps: ([0-9.]+)", "job.skip_steps=2", "job.steps=8")


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Returns the environment in which a package with these entries is installed, as pip leaves it."""

    def install(entries: str) -> dict[str, str]:
        site = tmp_path / "site"
        (site / "my_package").mkdir(parents=True)
        (site / "my_package" / "__init__.py").touch()
        (site / "my_package" / "levers.yaml").write_text(entries)
        code = "from pathlib import Path\n\ndef path():\n    return Path(__file__).with_suffix('.yaml')\n"
        (site / "my_package" / "levers.py").write_text(code)
        info = site / "my_package-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[overlap_sweep.levers]\nmine = my_package.levers:path\n")
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}

    return install


def analyze(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "analyze.py", *arguments]
    whole = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=whole, text=True, capture_output=True, check=False)


@pytest.mark.end_to_end
def test_it_is_listed_and_applied(installed: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    environment = installed(ENTRY)
    (row,) = json.loads(analyze(environment, "levers", "mine", "--format", "json").stdout)
    assert (row["lever"], row["values"], row["write"]) == ("mine.chunk_mb", "1, 4", "export MINE_CHUNK_MB=VALUE")
    (tmp_path / "t.py").write_text(PRINTS)
    launch = Launch(tmp_path / "sweep", environment)
    command = f"job.command='{sys.executable} {tmp_path}/t.py'"
    done = launch.run("-m", *JOB, *METRIC, command, "+job.levers.mine.chunk_mb=null,4")
    assert done.returncode == 0, done.stderr
    logs = {path.parent.name: path.read_text() for path in launch.directory.glob("*/worker.log")}
    assert sorted("tps: 4\n" in text for text in logs.values()) == [False, True]
    assert ["tps: 9\n" in text for name, text in logs.items() if "null" in name] == [True]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("mine.x: {what: x", "while parsing"),
        (ENTRY.replace("  environment: MINE_CHUNK_MB\n", ""), "a lever has one of environment, constructor, call"),
        (ENTRY.replace("kind: number", "kind: length"), "length"),
        (ENTRY.replace("environment: MINE_CHUNK_MB", "call: x:y").replace("write:", "note:"), "write is missing"),
        (ENTRY.replace("environment: MINE_CHUNK_MB", "argument: --x\n  program: mine"), "program is none of megatron,"),
    ],
)
def test_one_that_is_wrong_is_named_in_one_line(
    installed: Callable[[str], dict[str, str]], entries: str, said: str
) -> None:
    done = analyze(installed(entries), "levers")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: The levers of my_package.levers:path cannot be read (")
    assert said in line
    assert line.endswith("; fix or uninstall that package.")
