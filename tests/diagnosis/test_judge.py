"""The verdicts are what the independent script measures, and the public runs can be fetched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import fetch_public_traces
from tests.diagnosis.independent_judge import judge
from tests.diagnosis.judged import OWN, Judged, cases, verdicts
from tests.diagnosis.planted import unpack

BRIEF = ("own/alternating_work", "own/all_to_all_rank1_late", "own/host_function_in_stream", "own/pipeline")
"""Of the project's own recordings, those that say something different each; the others would take seconds."""


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    unpack(OWN, directory)
    return directory


@cases([each for each in verdicts().runs if not each.is_own or each.run in BRIEF])
def test_verdicts_have_what_the_script_measures(judged: Judged, own: Path) -> None:
    found = judge(judged.traces(own), frozenset(judged.left_out))
    assert f"{len(found.ranks)} of {found.world_size or 1}" == judged.ranks
    assert {name: count for name, count in found.collectives.items() if count} == judged.collectives
    measured = {name: found.worst(name) for name in judged.figures if name != "transfer_us"}
    if found.transfer_us is not None:
        measured["transfer_us"] = found.transfer_us
    assert measured == pytest.approx(judged.figures, abs=0.51)
    for rank, (calls, cost_us) in judged.late.items():
        assert (found.late[rank].calls, round(found.late[rank].cost_us)) == (calls, cost_us)


def test_fetching_takes_the_files_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "origin"
    traces = origin / "traces"
    traces.mkdir(parents=True)
    for name in ("rank0.json", "rank1.json", "other.txt"):
        (traces / name).write_text(name)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "init", "--quiet", origin], check=True)
    for setting in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        subprocess.run(["git", "-C", origin, "config", setting, "true"], check=True)
    subprocess.run(["git", "-C", origin, "add", "."], check=True)
    subprocess.run(["git", "-C", origin, *author, "commit", "--quiet", "-m", "traces"], check=True)
    commit = subprocess.run(["git", "-C", origin, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (tmp_path / "verdicts.yaml").write_text(
        f"sources:\n  made: {{repository: 'file://{origin}', commit: {commit.stdout.strip()}, licence: MIT}}\n"
        "runs:\n- {run: made/two_ranks, files: traces/rank*}\n- {run: own/one}\n"
    )
    monkeypatch.setattr(fetch_public_traces, "JUDGED", tmp_path)
    (directory,) = fetch_public_traces.fetch([], {}, tmp_path / "public")
    assert directory == tmp_path / "public" / "made" / "two_ranks"
    assert {path.name: path.read_text() for path in directory.iterdir()} == {
        "rank0.json": "rank0.json",
        "rank1.json": "rank1.json",
    }
    with pytest.raises(SystemExit, match=r"No public run is called own/one: there are made/two_ranks\."):
        fetch_public_traces.fetch(["own/one"], {}, tmp_path)
