"""Whether a setting that process groups have each for themselves is in force, from their kernels."""

import pytest

from overlap_sweep.effects import Difference
from overlap_sweep.effects.fingerprint import Family, Fingerprint, Moved, StepPrint
from overlap_sweep.effects.settings import verdicts


def recorded(**blocks: int) -> Fingerprint:
    """Returns a rank's step with one collective a process group, of so many thread blocks."""
    families = [Family(f"mesh_{group}, 2 ranks", "all_reduce", "bwd") for group in blocks]
    moved = [
        Moved(number, 64_000_000, "Float", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", own, 512, 0, 20, "")
        for number, own in enumerate(blocks.values())
    ]
    return Fingerprint(0, 4, True, families, ["0"] * len(blocks), 0, 0, [StepPrint(moved, {}, {}, {}, {})])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("dp:8", ("in force", "kernels of collectives of process groups dp have at most 8 blocks")),
        ("tp:8", ("not in force", "kernels of collectives of process groups tp have at most 24 blocks")),
        ("8", ("not in force", "kernels of collectives have at most 24 blocks")),
        ("dp:8+24", ("in force", "kernels of collectives of process groups dp have at most 8 blocks")),
        # Which ranks a group has is not recorded, and nothing else differs.
        ("0-1:8", ("cannot be seen", "NCCL took fewer blocks anyway")),
    ],
)
def test_only_the_groups_that_are_meant_count(value: str, expected: tuple[str, str]) -> None:
    prints = [recorded(dp=8, tp=24)]

    (setting,) = verdicts({"group.max_ctas": ("", value)}, prints, [], {"group.max_ctas": "NCCL_MAX_CTAS"})

    assert (setting.verdict, setting.evidence) == expected


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ({}, "in force"),
        ({"NCCL_MAX_CTAS": ("", "4")}, "in force"),
        ({"NCCL_MAX_CTAS": ("", "8")}, "cannot be seen"),
        ({"another": ("", "1")}, "cannot be seen"),
    ],
)
def test_an_unknown_setting_is_in_force_only_if_nothing_else_explains_what_differs(
    others: dict[str, tuple[str, str]], verdict: str
) -> None:
    """Of the others, 4 blocks are not in force, where 8 ran."""
    found = [Difference(aspect="blocks", before="24", after="8", sentence="24 blocks became 8")]

    judged = {one.name: one.verdict for one in verdicts({"typo": ("", "1"), **others}, [recorded(dp=8)], found, {})}

    assert judged["typo"] == verdict
