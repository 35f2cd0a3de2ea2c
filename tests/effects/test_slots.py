"""Whether the slots of a file ran, from recorded layers of Transformer Engine: what truly ran, and files that ask for
something else."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.effects import Slots
from overlap_sweep.effects.fingerprint import Family, Fingerprint, Moved, StepPrint
from overlap_sweep.effects.runs import read_prints
from overlap_sweep.effects.slots import slot_verdicts
from overlap_sweep.overlap import overlap_cfg, space
from tests.effects.recordings import unpack
from tests.golden.archives import unpack as unpack_sweep

TRACES = Path(__file__).parent.parent / "data" / "traces"

RING, OF_70B = "ring_ce1", "h200x4_llama3_70b_layer_"
GATHERED, SCATTERED = "in place of NCCL's all_gather of 134.2 MB", "in place of NCCL's reduce_scatter of 134.2 MB"
IN_BULK = {"qkv_dgrad": "bulk_sm4", "qkv_wgrad": "bulk_sm24", "fc1_dgrad": "bulk_sm2", "fc1_wgrad": "bulk_sm4"}
RINGS = dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), RING)
TRUE = {
    "pipeline_rs": {**RINGS, **IN_BULK, "proj_fprop": "pipeline_sm24_split4", "fc2_fprop": "pipeline_sm16_split4"},
    "ring_rs": {**RINGS, **IN_BULK, "proj_fprop": RING, "fc2_fprop": RING},
    "te_default": {
        **RINGS,
        **dict.fromkeys(IN_BULK, "bulk_sm16"),
        **dict.fromkeys(("proj_fprop", "fc2_fprop"), "pipeline_sm16_split4"),
    },
}
"""What ran, by recording and slot."""


@cache
def prints(*paths: Path) -> list[Fingerprint]:
    found = [one.print for one in read_prints(paths).values() if one.print]
    assert len(found) == len(paths)
    return found


def of_70b(name: str) -> list[Fingerprint]:
    return prints(TRACES / f"{OF_70B}{name}.json.gz")


def judged(
    before: list[Fingerprint], after: list[Fingerprint], asked: Mapping[str, str], **more: Any
) -> dict[str, tuple[str, str]]:
    """The verdicts and the evidence by slot; `asked`: names of settings."""
    settings = {slot: space.setting_of(name) or {"method": "none"} for slot, name in asked.items()}
    return {one.name: (one.verdict, one.evidence) for one in slot_verdicts(Slots(settings, **more), before, after)}


def verdicts(before: list[Fingerprint], after: list[Fingerprint], asked: Mapping[str, str]) -> dict[str, str]:
    return {slot: verdict for slot, (verdict, _) in judged(before, after, asked).items()}


@pytest.mark.parametrize("name", TRUE)
def test_what_ran_is_in_force(name: str) -> None:
    assert verdicts(of_70b("none"), of_70b(name), TRUE[name]) == dict.fromkeys(TRUE[name], "in force")


@pytest.mark.parametrize("name", TRUE)
def test_without_overlap_every_slot_fell_back(name: str) -> None:
    found = judged(of_70b("none"), of_70b("none"), TRUE[name])

    assert {verdict for verdict, _ in found.values()} == {"fell back"}
    assert found["fc1_dgrad"][1] == "NCCL's all_gather of 134.2 MB ran"
    assert found["fc2_fprop"][1] == "NCCL's reduce_scatter of 134.2 MB ran"


def test_evidence_is_what_ran_in_place_of_which_collective() -> None:
    found = judged(of_70b("none"), of_70b("pipeline_rs"), TRUE["pipeline_rs"])

    assert {slot: found[slot][1] for slot in ("fc1_fprop", "fc2_fprop", "fc1_dgrad", "fc1_wgrad")} == {
        "fc1_fprop": f"3 exchanges by Memcpy PtoP, {GATHERED}",
        "fc2_fprop": f"4 userbuffers_fp16_sum_inplace_gpu_rr_rs_oop with 16 blocks, {SCATTERED}",
        "fc1_dgrad": f"1 userbuffers_fp16_sum_inplace_gpu_rw_ag with 2 blocks, {GATHERED}",
        "fc1_wgrad": f"1 userbuffers_fp16_sum_inplace_gpu_rr_rs with 4 blocks, {SCATTERED}",
    }


PLANTED = {
    # another method
    ("proj_fprop", RING): f"4 userbuffers_fp16_sum_inplace_gpu_rr_rs_oop with 24 blocks ran, {SCATTERED}",
    ("fc1_dgrad", "pipeline_sm4"): f"1 userbuffers_fp16_sum_inplace_gpu_rr_rs with 4 blocks ran, {SCATTERED}",
    ("fc1_dgrad", RING): f"1 userbuffers_fp16_sum_inplace_gpu_rr_rs with 4 blocks ran, {SCATTERED}",
    ("fc2_dgrad", "none"): f"3 exchanges by Memcpy PtoP ran, {GATHERED}",
    # the method, but other knobs
    ("qkv_dgrad", "bulk_sm8"): (
        f"1 userbuffers_fp16_sum_inplace_gpu_rw_ag with 4 blocks ran, not num_sm=8, {GATHERED}"
    ),
    ("fc2_fprop", "pipeline_sm24_split2"): (
        "4 userbuffers_fp16_sum_inplace_gpu_rr_rs_oop with 16 blocks ran, not num_sm=24 num_splits=2, " + SCATTERED
    ),
    ("qkv_fprop", "ring_sm4_ce0"): f"3 exchanges by Memcpy PtoP ran, not use_ce=False, {GATHERED}",
}


@pytest.mark.parametrize("planted", PLANTED, ids="=".join)
def test_what_a_file_asks_for_and_did_not_run_is_not_in_force(planted: tuple[str, str]) -> None:
    found = judged(of_70b("none"), of_70b("pipeline_rs"), dict([planted]))

    assert found == {planted[0]: ("not in force", PLANTED[planted])}


PRESET = Path(__file__).parents[2] / "benchmarks" / "presets" / "bf16_h100_h8192_tp4_mbs1_seqlen8192.yaml"


@pytest.mark.parametrize(
    ("ran", "not_in_force"),
    [
        ("ub_preset", set()),
        ("ub_preset_qkv_dgrad", {"qkv_wgrad", "proj_fprop", "fc1_dgrad", "fc1_wgrad"}),
        ("ub_default", {"qkv_dgrad", "qkv_wgrad", "proj_fprop", "fc1_dgrad", "fc1_wgrad"}),
    ],
)
def test_of_a_published_preset_what_differs_from_the_defaults_is_not_in_force_with_them(
    ran: str, not_in_force: set[str], frameworks: Path
) -> None:
    before, after = (prints(frameworks / name / "trace_rank0.json") for name in ("ub_none", ran))

    found = slot_verdicts(Slots(overlap_cfg.read(PRESET).slots), before, after)

    assert {one.name for one in found if one.verdict != "in force"} == not_in_force
    assert {one.verdict for one in found} <= {"in force", "not in force"}
    assert len(found) == 10


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("frameworks"), "h200x2_frameworks") / "h200x2_frameworks"


def test_a_slot_without_a_method_is_the_librarys() -> None:
    (found,) = slot_verdicts(Slots({"fc1_dgrad": {"num_sm": 2}}), of_70b("none"), of_70b("pipeline_rs"))

    assert (found.after, found.verdict) == ("num_sm=2", "cannot be seen")
    assert found.evidence == "the file leaves the method to the library"


def test_slots_of_layers_in_a_row_are_told_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two layers of two GPUs, in four steps. In te.LayerNormMLP the two bulk overlaps are exchanged, so without
    ub_bulk_wgrad fc1 loses the other one."""
    folder = unpack(tmp_path_factory.mktemp("effects"), "h200x2") / "h200x2"
    none, bulk, half = (
        prints(folder / name / "trace_rank0.json") for name in ("ub_none", "ub_bulk_16_sm", "ub_no_bulk_wgrad")
    )
    asked = dict.fromkeys(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), "bulk_sm16")

    assert verdicts(none, bulk, asked) == dict.fromkeys(asked, "in force")
    assert verdicts(none, half, {**asked, "fc2_dgrad": RING}) == {
        "qkv_dgrad": "in force",
        "qkv_wgrad": "fell back",
        "fc1_dgrad": "fell back",
        "fc1_wgrad": "in force",
        "fc2_dgrad": "in force",
    }


def test_reduce_scatters_of_dgrad_are_told_from_all_gathers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """fc1's input is then gathered by NCCL, before fc2's ring exchange."""
    folder = tmp_path_factory.mktemp("layer")
    unpack_sweep("layer", folder)
    (point,) = folder.glob("llama3*")

    def variant(name: str) -> list[Fingerprint]:
        return prints(*(point / f"trace_{name}_rank{rank}.json.gz" for rank in (0, 1)))

    none, slots = variant("none"), [f"{one}_{phase}" for one in space.OPERATORS for phase in ("fprop", "dgrad")]
    rings = dict.fromkeys(slots, RING)
    default = judged(none, variant("default"), rings)

    assert verdicts(none, variant("ring-exchange"), rings) == dict.fromkeys(slots, "in force")
    assert verdicts(none, variant("rs-dgrad"), {slot: rings[slot] for slot in ("qkv_dgrad", "fc1_dgrad")}) == {
        "qkv_dgrad": "in force",
        "fc1_dgrad": "in force",
    }
    assert {slot for slot, (verdict, _) in default.items() if verdict == "not in force"} == {
        *("qkv_dgrad", "proj_fprop", "fc1_dgrad", "fc2_fprop"),
    }
    # The floor communicates nothing.
    assert {verdict for verdict, _ in judged(none, variant("floor"), rings).values()} == {"cannot be seen"}


def made(*steps: list[tuple[Any, ...]], pass_: str = "bwd", function: str = "_LinearBackward") -> Any:
    """Steps that moved this: a collective, its kernel, its blocks, and the function if it is another, each kernel on a
    stream of its own."""
    names = ["all_gather", "reduce_scatter", "userbuffers", "peer_copy"]
    streams: dict[str, int] = {}

    def moved(collective: str, kernel: str, blocks: int | None, of: str = function) -> Moved:
        stream = streams.setdefault(kernel, len(streams))
        return Moved(names.index(collective), 8_000_000, "", kernel, blocks, 1024, 0, stream, of)

    return [
        Fingerprint(
            rank=0,
            world_size=4,
            on_device=True,
            families=[Family("", name, pass_) for name in names],
            streams=[],
            ready=0,
            overtook=0,
            steps=[StepPrint([moved(*each) for each in step], {}, {}, {}, {}) for step in steps],
        )
    ]


NCCL = [("all_gather", "AllGather_RING_LL", 24)]
SENT = [("userbuffers", "kuserbuffers_pushsend", 7), ("userbuffers", "kuserbuffers_pushrecv", 1)]
PROJ = {"operators": ("proj",)}


def test_without_copy_engines_num_sm_is_the_blocks_that_send() -> None:
    found = judged(made(NCCL), made(3 * SENT), {"proj_dgrad": "ring_sm7_ce0"}, **PROJ)
    other = judged(made(NCCL), made(3 * SENT), {"proj_dgrad": "ring_sm8_ce1"}, **PROJ)

    instead = "in place of NCCL's all_gather of 8.0 MB"
    assert found == {"proj_dgrad": ("in force", f"3 exchanges by kuserbuffers_pushsend with 7 blocks, {instead}")}
    assert other["proj_dgrad"][1].removesuffix(f", {instead}") == (
        "3 exchanges by kuserbuffers_pushsend with 7 blocks ran, not num_sm=8 use_ce=True"
    )


def test_the_worst_of_all_times_counts() -> None:
    asked = {"proj_dgrad": "ring_sm7"}

    assert judged(made(NCCL), made(SENT, NCCL, SENT), asked, **PROJ) == {
        "proj_dgrad": ("fell back", "NCCL's all_gather of 8.0 MB ran (1 of 3 times)")
    }


def test_operators_of_the_same_function_are_told_apart_by_their_order() -> None:
    """As in Megatron-Core, whose fc2 comes before proj in the backward pass."""
    between = [(*each, "_LayerNormLinearBackward") for each in NCCL]

    found = verdicts(
        made(NCCL), made([*NCCL, *between, *SENT, *between]), dict.fromkeys(("proj_dgrad", "fc2_dgrad"), "ring_sm7")
    )

    assert found == {"proj_dgrad": "in force", "fc2_dgrad": "fell back"}


def test_what_cannot_be_told_apart_is_not_guessed() -> None:
    """proj and fc2 are the same function to Megatron-Core; here it was called once, or moved what it has no place for,
    or it is unknown what launched it."""
    asked = {"proj_dgrad": "ring_sm7"}
    twice = judged(made(NCCL), made([*NCCL, *SENT]), asked, **PROJ)
    by_nobody = judged(made(NCCL), made(SENT, function=""), asked, **PROJ)

    assert twice["proj_dgrad"] == (
        "cannot be seen",
        "not to be told apart: NCCL's all_gather of 8.0 MB, 1 exchange by kuserbuffers_pushsend with 7 blocks",
    )
    assert by_nobody["proj_dgrad"] == ("cannot be seen", "no function of Transformer Engine is seen to launch it")
    assert judged(made(NCCL), made(SENT), asked)["proj_dgrad"][0] == "cannot be seen"


def test_what_is_recomputed_does_not_count_as_forward() -> None:
    found = judged(made(NCCL), made(SENT, function="_LayerNormLinear"), {"qkv_fprop": "ring_sm7"}, operators=("qkv",))

    assert found["qkv_fprop"][0] == "cannot be seen"
