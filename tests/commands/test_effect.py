"""`analyze.py effect`, beside what golden files hold of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap_sweep.commands import effect
from overlap_sweep.results import run_directory
from tests.analyze import analyze
from tests.effects.recordings import unpack


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("recorded")) / "h200x2"


def test_json_is_an_object_of_one_run_and_a_list_of_several(recorded: Path) -> None:
    against = ("--against", recorded / "ddp_1", "--format", "json")

    one = json.loads(analyze("effect", recorded / "ddp_bucket_200", *against).stdout)
    several = json.loads(analyze("effect", recorded / "ddp_bucket_200", recorded / "ddp_2", *against).stdout)

    assert one["changed"]
    assert [each["aspect"] for each in one["differences"]] == ["calls"]
    assert set(one["differences"][0]) == {
        *("aspect", "group", "collective", "pass", "before", "after", "sentence", "ranks"),
    }
    assert several == [one, several[1]]
    assert not several[1]["changed"]


def test_a_setting_that_was_given_is_judged(recorded: Path) -> None:
    done = analyze("effect", recorded / "fsdp2_algo_tree", "--against", recorded / "fsdp2_1", "--set", "NCCL_ALGO=Tree")

    assert done.stdout.splitlines()[1:] == [
        "  nothing changed: the setting was not in force, or changes nothing here",
        "  NCCL_ALGO=Tree: fell back: AllGather_RING_LL ran instead",
    ]


def test_ranks_may_be_given_by_themselves(recorded: Path) -> None:
    before, after = (recorded / name / "trace_rank1.json" for name in ("ddp_1", "ddp_max_ctas_4"))

    done = analyze("effect", after, "--against", before)

    assert "thread blocks of all_reduce: 24 became 4 (bwd, 2 ranks)" in done.stdout
    assert done.stderr == "warning: Compared rank 1 of 2: what changes on others is unknown.\n"


def test_slots_of_a_file_are_looked_for(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("fc2_fprop: {method: pipeline, num_sm: 16, num_splits: 4, cga_size: 2}\n")
    against = (recorded / "ub_pipeline_fc2", "--against", recorded / "ub_none")

    done = analyze(
        "effect", *against, "--set", f"tp_comm_overlap_cfg={tmp_path}/cfg.yaml", "--set", "fc1_dgrad=bulk_sm8"
    )

    bulk, instead = "userbuffers_fp16_sum_inplace_gpu_rw_ag with 16 blocks", "in place of NCCL's"
    assert done.stdout.splitlines()[-2:] == [
        "  fc2_fprop=pipeline num_sm=16 num_splits=4: in force: 4 userbuffers_fp16_sum_inplace_gpu_rr_rs_oop with 16 "
        f"blocks, {instead} reduce_scatter of 33.6 MB",
        f"  fc1_dgrad=bulk num_sm=8: not in force: 1 {bulk} ran, not num_sm=8, {instead} all_gather of 33.6 MB",
    ]


def test_what_is_asked_of_a_slot_is_the_name_of_a_setting(recorded: Path) -> None:
    done = analyze("effect", recorded / "ub_default", "--against", recorded / "ub_none", "--set", "fc1_dgrad=16")

    assert done.stderr.endswith("error: --set fc1_dgrad=16: 16 is not a setting; give one such as bulk_sm16.\n")


def test_options_of_how_to_run_a_point_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search gives its points others, such as no retries."""
    (tmp_path / run_directory.RESULT_FILE).touch()
    recorded = {"repetition": 1, "runtime": {"retries": 0, "timeout_s": 30.0, "multicast": False}}
    monkeypatch.setattr(run_directory, "read_result", lambda _: SimpleNamespace(recorded=recorded))

    assert list(effect._options(tmp_path)) == ["runtime.multicast"]
