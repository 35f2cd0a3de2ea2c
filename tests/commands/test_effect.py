"""`analyze.py effect`, beside what golden files hold of it."""

import json
from pathlib import Path

import pytest

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
