"""What is found for NCCL: what is worth trying in a trace, and the files that say it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.predictions_table import unpacked
from overlap_sweep.errors import UserError
from overlap_sweep.nccl.settings import GroupSetting
from overlap_sweep.optimizer.candidates import Candidate
from overlap_sweep.optimizer.groups import Purpose
from overlap_sweep.optimizer.nccl import nccl, tried_in
from overlap_sweep.optimizer.nccl_files import settings_of, write
from overlap_sweep.results.records import Expected, KnobRecord
from overlap_sweep.results.run_directory import Result
from tests.make_point import made_result
from tests.search.stand_in import sweep_of

DATA = Path(__file__).parent.parent / "data"
DP = Purpose((("DATA_PARALLEL_GROUP", (0, 2)), ("DATA_PARALLEL_GROUP", (1, 3))), ["DATA_PARALLEL_GROUP"], 24)
PAIRS = Purpose((("", (0, 1)), ("", (2, 3))), ["0-1", "2-3"], 24)


def test_values_become_settings_of_the_groups_that_they_are_for() -> None:
    levers = {
        "group.max_ctas": "DATA_PARALLEL_GROUP:8+0-1:16+2-3:16",
        "group.high_priority": "DATA_PARALLEL_GROUP:true",
        "nccl.proto": "allgather:LL128",
        "nccl.cga_cluster_size": 2,
        # No form has a place for it.
        "nccl.buffsize": "8388608",
        "ddp.bucket_cap_mb": 4,
    }
    assert settings_of(levers, [DP, PAIRS]) == [
        GroupSetting(description="DATA_PARALLEL_GROUP", size=2, max_ctas=8, high_priority=True),
        GroupSetting(ranks=(0, 1), size=2, max_ctas=16),
        GroupSetting(ranks=(2, 3), size=2, max_ctas=16),
        GroupSetting(cga_cluster_size=2),
        GroupSetting(collective="all_gather", protocol="ll128"),
    ]


def test_files_are_written_that_can_say_something(tmp_path: Path) -> None:
    lines = [*write(tmp_path, {"group.max_ctas": "DATA_PARALLEL_GROUP:8"}, [DP], "2.28.9", multicast=False)]
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"nccl_communicator_config.yaml", "pg_options.py"}
    assert yaml.safe_load((tmp_path / "nccl_communicator_config.yaml").read_text()) == {"dp": {"max_ctas": 8}}
    assert [name in line for name, line in zip(sorted(written), lines, strict=True)] == [True, True]
    assert [*write(tmp_path, {"ddp.bucket_cap_mb": 4}, [DP], "2.28.9", multicast=False)] == []


def test_what_the_trace_shows_is_tried(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, DATA / "causes/h200x2") / "manual_connections_32"
    tried = tried_in(sorted(folder.glob("*.json*")))
    assert {one.lever for one in tried} <= {f"nccl.{name}" for name in ("max_ctas", "cta_policy", "cga_cluster_size")}
    assert tried[0].expected
    assert [one.gain for one in tried] == sorted((one.gain for one in tried), reverse=True)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["workload=operator"], "hydra/sweeper=nccl is for workload=job,fsdp,tp_training, not for workload=operator"),
        (["workload=fsdp", "runtime.device=cpu", "distributed.dp_size=1"], "NCCL runs on GPUs only"),
    ],
)
def test_where_nccl_does_not_run(typed: list[str], said: str, tmp_path: Path) -> None:
    with sweep_of(tmp_path / "found", *typed) as stand_in, pytest.raises(UserError, match=said):
        nccl(stand_in.inputs(*typed))


@pytest.mark.parametrize(
    ("section", "typed"),
    [
        ("distributed", ("workload=fsdp", "model=ranking_tiny", "runtime.device=cuda", "distributed.dp_size=2")),
        ("tp_training", ("workload=tp_training", "model=qwen3_tiny", "runtime.device=cuda", "tp_size=2")),
    ],
)
def test_a_training_of_ours_gets_the_variables_that_its_trace_calls_for(
    section: str,
    typed: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = Expected(0.05, 0.02, 0.08, is_predicted=True)
    worth = [Candidate("nccl.max_ctas", value, "rounding", expected) for value in (8, 4)]
    monkeypatch.setattr("overlap_sweep.runtime.point.visible_gpus", lambda: 2)
    read: list[Path] = []
    monkeypatch.setattr("overlap_sweep.optimizer.nccl.tried_in", lambda traces, nodes: read.extend(traces) or worth)

    def answer(point: Mapping[str, Any]) -> Result:
        blocks = (point[section]["env"] or {}).get("NCCL_MAX_CTAS")
        time_us = {None: 10_000.0, "8": 9_300.0, "4": 9_900.0}[blocks]
        run = {"step_us": time_us, "spread_us": 0.003 * time_us, "objective_us": time_us, "started": None}
        if section == "distributed":
            run |= {"none_us": 12_000.0, "floor_us": 8_000.0}
        return made_result(
            typed[0].partition("=")[2], point, **run, traces=["trace_rank0.json.gz", "trace_none_rank0.json.gz"]
        )

    with sweep_of(tmp_path, *typed, answer=answer) as stand_in:
        nccl(stand_in.inputs(*typed))

    (found,) = KnobRecord.read(tmp_path / KnobRecord.FILE).searches
    assert found.best == {f"+{section}.env.NCCL_MAX_CTAS": "8"}
    assert found.proven
    assert [path.name for path in read] == ["trace_rank0.json.gz"]
    assert "nccl.max_ctas=8  +5.0% (2.0 to 8.0)" in capsys.readouterr().out
