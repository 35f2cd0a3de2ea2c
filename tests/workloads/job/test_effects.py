"""What the report of a job says of settings that changed nothing in what ran."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from overlap_sweep import levers
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.effects.settings import known
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.workloads import analyse
from tests.analyze import analyze
from tests.effects.test_differences import GEMMS
from tests.make_point import job_config, make_point
from tests.timeline import Timeline


def run(
    directory: Path,
    max_ctas: int | None,
    step_us: float,
    *,
    blocks: int,
    chosen: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """A job of three steps, each with one all-reduce of so many thread blocks."""
    made, at = Timeline(), 10_000.0
    for number in range(3):
        start = at - 600
        for _ in range(GEMMS):
            made.kernel(at, at + 90)
            at += 100
        made.collective("all_reduce", at, at + 50, blocks=blocks)
        at += 1_000
        made.step(number + 1, start, at - 600)
    env = {} if max_ctas is None else {"NCCL_MAX_CTAS": max_ctas}
    for repetition in range(4):
        point = make_point(
            "job",
            directory,
            job_config(
                {}, env, **{"repetition": repetition, "runtime.device": "cuda", "job.levers": dict(chosen or {})}
            ),
            step_us=step_us + repetition,
            started=f"2026-11-20T21:{len(list(directory.glob('*'))):02}:00+00:00",
            traces=[trace_file(0)],
        )
        made.write(point / trace_file(0))


def test_a_winner_that_changed_nothing_is_called_noise(tmp_path: Path) -> None:
    run(tmp_path, None, 100_000.0, blocks=24)
    run(tmp_path, 4, 90_000.0, blocks=24)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    (answer,) = section.answers

    assert answer.cautions[:2] == [
        "NCCL_MAX_CTAS=4 changed nothing in what ran, so its gain is noise.",
        "As the traces show: job.env.NCCL_MAX_CTAS=4 not in force: kernels of collectives have at most 24 blocks.",
    ]
    rows = {row.setting: row for row in answer.compared.rows}
    assert rows["NCCL_MAX_CTAS=4"].note == "best, not profiled, changed nothing"
    assert rows["NCCL_MAX_CTAS=4"].effect.in_brief == "nothing"
    assert rows["defaults"].effect is None


def test_points_are_known_by_their_own_results(tmp_path: Path) -> None:
    """Also where the name of one begins with another's."""
    for name, max_ctas in (("base", 24), ("ctas=1", 1), ("ctas=10", 10)):
        run(tmp_path / "sweeps" / name, max_ctas, 100_000.0, blocks=max_ctas)
        (tmp_path / "sweeps" / name / "job_0").rename(tmp_path / name)
    paths = [tmp_path / name for name in ("ctas=1", "ctas=10")]

    found = json.loads(analyze("effect", *paths, "--against", tmp_path / "base", "--format", "json").stdout)

    assert [[(one["before"], one["after"], one["verdict"]) for one in each["settings"]] for each in found] == [
        [("24", "1", "in force")],
        [("24", "10", "in force")],
    ]


def test_values_are_said_as_they_are_typed(tmp_path: Path) -> None:
    run(tmp_path, None, 100_000.0, blocks=24)
    run(tmp_path, None, 90_000.0, blocks=24, chosen={"fsdp2": {"reshard_after_forward": False}})

    ran = analyze("effect", tmp_path / "job_4", "--against", tmp_path / "job_0").stdout

    assert "job.levers.fsdp2.reshard_after_forward=false: not in force" in ran


def test_what_a_setting_changed_is_in_its_row(tmp_path: Path) -> None:
    run(tmp_path, None, 100_000.0, blocks=24)
    run(tmp_path, 4, 90_000.0, blocks=4)

    (section,) = analyse(tmp_path, AnalysisConfig()).sections
    (answer,) = section.answers

    assert not [caution for caution in answer.cautions if "noise" in caution or "traces show" in caution]
    assert section.points.table.records(section.points.rows)[-1]["effect"] == "blocks"


def test_levers_are_seen_by_their_entries_not_by_their_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ran otherwise: what must have shown is not in force, what cannot show is not blamed."""
    all_levers = levers.levers()
    unseen = msgspec.structs.replace(all_levers["ddp.bucket_cap_mb"], effect="")
    monkeypatch.setattr(levers, "levers", lambda: all_levers | {"host.max_ctas": unseen})
    chosen = {"nccl": {"max_ctas": 4}, "fsdp2": {"prefetch": 2}, "host": {"max_ctas": 2}}
    run(tmp_path, None, 100_000.0, blocks=24)
    run(tmp_path, None, 90_000.0, blocks=24, chosen=chosen)

    (answer,) = analyse(tmp_path, AnalysisConfig()).sections[0].answers
    ran = analyze("effect", tmp_path / "job_4", "--against", tmp_path / "job_0", "--format", "json").stdout

    effect = answer.compared.rows[0].effect
    for found in (
        {one.name: (one.verdict, one.evidence) for one in effect.settings},
        {one["name"]: (one["verdict"], one["evidence"]) for one in json.loads(ran)["settings"]},
    ):
        assert found == {
            "job.levers.nccl.max_ctas": ("not in force", "kernels of collectives have at most 24 blocks"),
            "job.levers.fsdp2.prefetch": ("not in force", "it would show in position, where nothing differs"),
            "job.levers.host.max_ctas": ("cannot be seen", "a trace does not show it"),
        }
    noise, shown = (caution for caution in answer.cautions if "what ran" in caution or "traces show" in caution)
    assert noise.endswith("changed nothing in what ran, so its gain is noise, unless a trace does not show it.")
    assert "job.levers.fsdp2.prefetch=2 not in force" in shown
    assert "host" not in shown


def test_every_lever_that_a_trace_shows_names_an_entry() -> None:
    assert [name for name, one in levers.levers().items() if one.effect and not known(one.effect)] == []
