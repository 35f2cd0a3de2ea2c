"""What levers are written with, for recordings in which something is planted, and what their names mean."""

from pathlib import Path

import pytest

from benchmarks.predictions_table import DATA, unpacked
from overlap_sweep.commands.lever_values import NO_SETTINGS, meant_by
from overlap_sweep.commands.levers import lever_rows, order_of
from overlap_sweep.levers import PLACEHOLDER, levers
from overlap_sweep.predict.named import CHANGES
from overlap_sweep.report.table import Row
from tests.analyze import analyze, rows


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    made = folder / "all"
    made.mkdir()
    for archive in ("h200x2", "h200x2_reads_and_ctas"):
        for directory in unpacked(folder, DATA / "causes" / archive).iterdir():
            if directory.is_dir():
                (made / directory.name).symlink_to(directory)
    return made


def ordered(recording: Path, *names: str) -> list[Row]:
    """Returns the rows of levers that apply, as they are shown."""
    found, target, _ = lever_rows(names, str(recording))
    return sorted((row for row in found if row["applies"] == "yes"), key=lambda row: order_of(row, target))


@pytest.mark.parametrize(
    ("recording", "lever", "write"),
    [
        ("manual_connections_1", "cuda.max_connections", "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ("ddp_connections_1", "cuda.max_connections", "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ("fsdp2_connections_1", "cuda.max_connections", "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ("ddp_one_bucket", "ddp.bucket_cap_mb", "DistributedDataParallel(model, bucket_cap_mb=25)"),
        ("few_ctas", "nccl.min_ctas", "export NCCL_MIN_CTAS=16"),
        (
            "fsdp2_no_prefetch",
            "fsdp2.reshard_after_forward",
            "fully_shard(unit, reshard_after_forward=False)  # units, but not the whole model",
        ),
        ("fsdp1_no_prefetch", "fsdp1.forward_prefetch", "FullyShardedDataParallel(model, forward_prefetch=True)"),
    ],
)
def test_the_lever_that_gains_most_comes_first_with_the_value_that_does(
    recordings: Path, recording: str, lever: str, write: str
) -> None:
    first = ordered(recordings / recording)[0]
    assert (first["lever"], first["write"]) == (lever, write)
    assert first["gain_us"] > 0
    assert first["mends"]


def test_copy_engines_are_not_written_for_all_reduces_which_they_cannot_do(recordings: Path) -> None:
    rows_by_lever = {row["lever"]: row for row in ordered(recordings / "fewer_ctas")}
    policy = rows_by_lever["nccl.cta_policy"]
    assert (policy["write"], policy["gain_us"]) == ("export NCCL_CTA_POLICY=1", None)


@pytest.mark.parametrize(
    ("recording", "lever"),
    [
        ("fewer_ctas", "nccl.max_ctas"),
        ("ddp_connections_32", "cuda.max_connections"),
        ("fsdp2_straggler", "fsdp2.prefetch"),
        ("ddp_one_bucket", "nccl.max_ctas"),
    ],
)
def test_what_is_predicted_to_be_slower_or_the_same_is_not_written(
    recordings: Path, recording: str, lever: str
) -> None:
    (row,) = ordered(recordings / recording, lever)
    assert row["write"] is None
    assert row["gain_us"] <= 0
    assert row["note"].startswith("No value is predicted to gain.")
    assert ordered(recordings / recording)[-1]["write"] is None


def test_what_is_named_is_written_and_its_loss_is_said(recordings: Path) -> None:
    (row,) = ordered(recordings / "fewer_ctas", "nccl.max_ctas=8")
    assert row["write"] == "export NCCL_MAX_CTAS=8"
    assert row["gain_high_us"] < 0
    assert row["note"] == "It is predicted to be slower."


@pytest.mark.parametrize("recording", ["fsdp2_straggler", "ddp_straggler", "moe_uneven"])
def test_a_rank_that_computes_more_gets_no_levers_of_its_host(recordings: Path, recording: str) -> None:
    assert not [row["lever"] for row in ordered(recordings / recording) if "straggler" in row["mends"]]


def test_a_rank_whose_host_pauses_gets_them(recordings: Path) -> None:
    mending = {row["lever"] for row in ordered(recordings / "host_straggler") if "straggler" in row["mends"]}
    assert mending == {"host.collect_every"}


def test_what_the_recording_shows_to_be_set_is_not_offered(recordings: Path) -> None:
    found, _, _ = lever_rows(["optimizer.fused"], str(recordings / "fsdp2_straggler"))
    assert [row["applies"] for row in found] == ["no: the trace shows that it is set (fused)"]


def test_what_reduces_gradients_does_not_mend_sums_of_activations(recordings: Path) -> None:
    found, target, _ = lever_rows([], str(recordings / "tp_blocking"))
    possible = [row for row in found if not row["applies"].startswith("no")]
    assert not [row["lever"] for row in possible if "dependency" in row["mends"]]
    assert target
    assert any(one.startswith("dependency: no lever") and "async TP" in one for one in target.about)


def test_without_a_recording_no_line_has_one_of_several_values_or_the_default() -> None:
    for row in rows("levers"):
        lever = levers()[row["lever"]]
        plain = [one for one in lever.values if not lever.is_scoped(one)]
        if len([one for one in plain if one != lever.default]) > 1 and "{value}" in (lever.write or "{value}"):
            assert PLACEHOLDER in row["write"], row["lever"]
        if plain != [lever.default] and lever.default in plain and "{value}" in lever.write:
            assert row["write"] != lever.written(lever.default)


@pytest.mark.parametrize("change", [f"{name}={(one.values or ['2'])[0]}" for name, one in CHANGES.items()])
def test_a_change_is_a_lever_or_said_to_be_none(change: str) -> None:
    found = meant_by([change])
    assert not found.unknown
    if change.partition("=")[0] in NO_SETTINGS:
        assert not found.values
        assert f"{change} is no setting" in found.notes[0]
    else:
        assert found.values


def test_names_of_changes_and_variables_are_those_of_levers() -> None:
    found = meant_by(
        ["env.CUDA_DEVICE_MAX_CONNECTIONS=8", "NCCL_MAX_CTAS=4", "fsdp2.prefetch=2+link.times=2", "ddp.bukt"]
    )
    assert found.values == {"cuda.max_connections": 8, "nccl.max_ctas": 4, "fsdp2.prefetch": 2}
    assert found.notes[0] == "env.CUDA_DEVICE_MAX_CONNECTIONS=8 is the lever cuda.max_connections=8."
    assert found.unknown == ["Unknown lever ddp.bukt. Leave it out for all."]


def test_a_value_that_is_named_is_written() -> None:
    (row,) = rows("levers", "nccl.cta_policy=2")
    assert row["write"] == "export NCCL_CTA_POLICY=2"
    wrong = analyze("levers", "nccl.cta_policy=7")
    assert (wrong.returncode, wrong.stderr) == (2, "error: job.levers.nccl.cta_policy=7 is not one of 0, 1, 2.\n")
