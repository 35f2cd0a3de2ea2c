"""`analyze.py predict`."""

import json
from pathlib import Path

import pytest

from overlap_sweep.predict.named import CHANGES
from tests.analyze import analyze
from tests.diagnosis.planted import ARCHIVES, unpack


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    unpack(ARCHIVES / "h200x2.tar.xz", directory)
    return directory


def test_json_is_a_list_in_the_order_of_the_changes(recorded: Path) -> None:
    wanted = ("--change", "ddp.bucket_cap_mb=25", "--change", "fsdp2.prefetch=1", "--format", "json")

    told, untold = json.loads(analyze("predict", recorded / "ddp_one_bucket", *wanted).stdout)

    assert (told["change"], untold["change"]) == ("ddp.bucket_cap_mb=25", "fsdp2.prefetch=1")
    assert told["step_us"] == pytest.approx(26906.5, abs=1)
    assert told["low_us"] < told["predicted_us"] < told["high_us"] < told["step_us"]
    assert told["gain_us"] == pytest.approx(told["step_us"] - told["predicted_us"])
    assert told["critical"].startswith("GEMMs 7")
    assert untold["reason"] == "No all-gather of parameters was recorded."
    assert [untold[name] for name in ("predicted_us", "low_us", "high_us", "gain_us")] == [None] * 4


def test_without_a_change_all_that_apply_the_best_first(recorded: Path) -> None:
    done = analyze("predict", recorded / "fsdp2_no_prefetch", "--format", "json")

    found = json.loads(done.stdout)
    gains = [one["gain_us"] for one in found]
    names = {one["change"].partition("=")[0] for one in found}
    assert gains == sorted(gains, reverse=True)
    assert {"fsdp2.prefetch", "fsdp2.reshard_after_forward", "link.times"} <= names
    assert not {name for name in names if name.startswith("ddp.")}


def test_values_that_are_not_predicted_cannot_be_told(recorded: Path) -> None:
    wanted = (
        "--change",
        "ddp.bucket_cap_mb=0",
        "--change",
        "ddp.hooks=false",
        "--change",
        "link.times=2",
        "--format=json",
    )

    zero, off, link = json.loads(analyze("predict", recorded / "ddp_one_bucket", *wanted).stdout)

    assert (zero["status"], zero["reason"]) == ("cannot tell", "ddp.bucket_cap_mb=0: 0 is not a number above 0.")
    assert (off["status"], off["reason"]) == ("cannot tell", "ddp.hooks=false: false is not predicted, only true.")
    assert link["status"] == "bound"


def test_several_changes_are_one(recorded: Path) -> None:
    both = "fsdp2.prefetch=1+fsdp2.reshard_after_forward=false"
    wanted = ("--change", both, "--change", "fsdp2.reshard_after_forward=false", "--format", "json")

    joined, alone = json.loads(analyze("predict", recorded / "fsdp2_no_prefetch", *wanted).stdout)

    assert joined["change"] == both
    assert joined["predicted_us"] < alone["predicted_us"]


def test_a_recording_with_the_change_is_compared(recorded: Path) -> None:
    change = ("--change", "env.CUDA_DEVICE_MAX_CONNECTIONS=32", "--against", recorded / "manual_connections_32")

    (one,) = json.loads(analyze("predict", recorded / "manual_connections_1", *change, "--format", "json").stdout)

    assert one["measured_us"] == pytest.approx(11239.7, abs=1)
    assert one["error_share"] == pytest.approx(one["predicted_us"] / one["measured_us"] - 1)
    assert one["within"]
    assert one["wrong"] == "GEMMs 635 us more than predicted"


def test_a_lever_that_is_not_predicted_is_answered_beside_others(recorded: Path) -> None:
    wanted = ("--change", "ddp.first_bucket_mb=1", "--change", "ddp.bucket_cap_mb=25", "--format", "json")

    untold, told = json.loads(analyze("predict", recorded / "ddp_one_bucket", *wanted).stdout)

    assert (untold["change"], untold["status"]) == ("ddp.first_bucket_mb=1", "cannot tell")
    assert untold["reason"].startswith("What ddp.first_bucket_mb gains is not predicted")
    assert (told["change"], told["status"]) == ("ddp.bucket_cap_mb=25", "predicted")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--change", "ddp.bucket_cap_bm=25"],
            "error: Unknown change ddp.bucket_cap_bm. Did you mean ddp.bucket_cap_mb?",
        ),
        (
            ["--change", "ddp.bucket_cap_mb"],
            "error: ddp.bucket_cap_mb is not NAME=VALUE, such as ddp.bucket_cap_mb=25.",
        ),
        (
            ["--change", "ddp.first_bucket_mb=1"],
            "error: What ddp.first_bucket_mb gains is not predicted: leave it out, and measure that lever.",
        ),
        (
            ["--change", "link.times=2+transformers.ddp_bucket_cap_mb=50"],
            "error: transformers.ddp_bucket_cap_mb is predicted as ddp.bucket_cap_mb=50; give that instead.",
        ),
        (
            ["--change", "loader.num_workers=4"],
            "error: loader.num_workers gains at most what is predicted of loader.ready=true; give that instead.",
        ),
        (
            ["--change", "loader.num_worker=4"],
            "error: Unknown change loader.num_worker. Did you mean loader.num_workers?",
        ),
        (
            ["--change", "ddp.bucket_cap_mb=abc"],
            "error: ddp.bucket_cap_mb=abc: abc is not a number above 0.",
        ),
        (
            ["--change", "nccl.max_ctas=dp:8+tp:q"],
            "error: nccl.max_ctas=dp:8+tp:q: q is not a number above 0.",
        ),
        (
            ["--change", "link.times=2+batch.times=1e30"],
            "error: batch.times=1e30: 1e30 is not a number above 0 and up to 1,000,000.",
        ),
        (
            ["--change", ""],
            f"error: A change is missing. Choose from {', '.join(CHANGES)}.",
        ),
        (["--against", "elsewhere"], "error: --against is a recording with a change made; name that with --change."),
    ],
)
def test_mistakes_are_one_line(recorded: Path, words: list[str], error: str) -> None:
    done = analyze("predict", recorded / "ddp_one_bucket", *words)

    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, error, "")
