"""The tuner where a precision limits what can be overlapped, with results that are made up."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.recipes import RECIPES
from overlap_sweep.results.run_directory import Result
from tests.golden.refusals import machine
from tests.search.stand_in import Settings, StandIn, operator_result, results
from tests.tuner.test_workflow import answered, layers, proofs, search_of, tuned

ON_GPUS = (
    *("runtime.device=cuda", "backend=transformer_engine", "workload.tokens=2048", "tp_size=2"),
    *("model.hidden_size=1024", "model.ffn_hidden_size=2048", "search.max_points=40"),
)
SPACE = ("operator=fc1,fc2", "method=ring_exchange,bulk,pipeline", "num_sm=8", "tuner.together=1")
REASON = "Transformer Engine: Device compute capability 10.0 or higher required for MXFP8 execution"


@pytest.fixture(autouse=True)
def eight_gpus() -> Iterator[None]:
    with machine(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("overlap_sweep.tuner.workflow.visible_gpus", lambda: 8)
        yield


def tuned_in(precision: str, directory: Path, **more: Any) -> StandIn:
    return tuned(directory, *ON_GPUS, f"precision={precision}", space=SPACE, **more)


def faster(pass_name: str, settings: Settings) -> float:
    return 0.9


def faster_layer(config: OverlapConfig) -> float:
    return 0.95


def test_fp8_block_is_tuned_where_it_overlaps_and_says_where_it_does_not(tmp_path: Path) -> None:
    launcher = tuned_in("fp8_block", tmp_path, answer=answered(faster, faster_layer))
    overlapped = {
        (phase, setting["method"])
        for point in launcher.points
        for phase, setting in (point.get("phases") or {}).items()
        if setting["method"] != "none"
    }
    assert overlapped == {("wgrad", "bulk")}
    reason = RECIPES["fp8_block"].without_overlap
    assert search_of(tmp_path)["dropped"] == {"qwen3_0_6b TP=2 fc2": reason}

    assert all("none" in point["layer"]["variants"] for point in layers(launcher))
    proof = proofs(tmp_path)[2]
    assert (proof["proven"], set(proof["variants"])) == (True, {"none", "tuned", "floor"})
    slots = yaml.safe_load((tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text())
    assert {slot: setting["method"] for slot, setting in slots.items()} == {"fc1_wgrad": "bulk"}
    on = {name for name, is_on in proof["switches"].items() if is_on}
    assert on == {"tp_comm_overlap", "tp_comm_bulk_wgrad"}


def test_a_layer_that_fails_in_fp8_block_is_run_alone_and_the_answer_has_the_reason(tmp_path: Path) -> None:
    """The default cannot be its comparison: it is refused."""

    def answer(point: Mapping[str, Any]) -> Result:
        result = answered(faster, faster_layer)(point)
        if point["workload"]["name"] == "layer" and point["layer"]["configurations"]:
            return structs.replace(
                result, status="failed", measured=None, error="rank 1: ValueError: no such quantizer"
            )
        return result

    launcher = tuned_in("fp8_block", tmp_path, answer=answer)
    assert [len(point["layer"]["variants"]) for point in layers(launcher)] == [3, 1]
    proof = proofs(tmp_path)[2]
    assert not proof["proven"]
    assert "rank 1: ValueError: no such quantizer" in proof["verdict"]
    assert "keep overlap off" in proof["verdict"]


def test_nothing_is_started_in_nvfp4(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        tuned_in("nvfp4", tmp_path)
    assert str(raised.value) == f"There is nothing to search: {RECIPES['nvfp4'].without_overlap}."
    assert not results(tmp_path)


def skipped(point: Mapping[str, Any]) -> Result:
    return operator_result(point, status="skipped", measured=None, error=REASON)


def test_a_gpu_without_the_precision_ends_the_search_with_the_library_s_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as raised:
        tuned_in("mxfp8", tmp_path, answer=skipped)
    assert str(raised.value) == f"Nothing can be measured: {REASON}."
    assert "not searched" not in capsys.readouterr().out
    assert {result.error for result in results(tmp_path).values()} == {REASON}


def test_other_precisions_are_searched_beside_one_that_the_gpu_lacks(tmp_path: Path) -> None:
    def answer(point: Mapping[str, Any]) -> Result:
        return skipped(point) if point["precision"] == "mxfp8" else operator_result(point, faster)

    given = (*ON_GPUS, "precision=bf16,mxfp8", "tuner.prove=false")
    tuned(tmp_path, *given, space=("operator=fc2", "method=ring_exchange", "num_sm=8"), answer=answer)
    found = search_of(tmp_path)
    assert found["dropped"] == {"qwen3_0_6b TP=2 fc2": f"its baseline without overlap failed: {REASON}"}
    assert {search["operator"] for search in found["searches"]} == {"fc2"}
