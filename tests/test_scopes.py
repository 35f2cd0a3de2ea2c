"""Which process groups a value is for."""

from collections.abc import Sequence

import pytest

from overlap_sweep.scopes import is_meant, scope_of, value_for


@pytest.mark.parametrize(
    ("scope", "description", "ranks", "meant"),
    [
        ("dp", "mesh_dp", [0, 1], True),
        ("dp", "mesh_dp_replicate", [0, 1], True),
        ("dp", "mesh_ddp", [0, 1], False),
        ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP", [0, 1], True),
        ("default_pg", "default_pg", [0, 1], True),
        ("0-3", "", [0, 1, 2, 3], True),
        ("0-3", "", [3, 1, 2, 0], True),
        ("0-3", "", [0, 1], False),
        ("1-7/2", "", [1, 3, 5, 7], True),
    ],
)
def test_which_process_groups_are_meant(scope: str, description: str, ranks: list[int], meant: bool) -> None:
    assert is_meant(scope, description, ranks) is meant


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", "8"), ("dp:8", "8"), ("tp:8", None), ("tp:4+dp:8", "8"), ("dp:8+4", "8"), ("tp:8+4", "4"), ("0-1:2+4", "2")],
)
def test_the_first_part_that_is_meant_counts(text: str, expected: str | None) -> None:
    assert value_for(text, "mesh_dp", [0, 1]) == expected


@pytest.mark.parametrize(
    ("description", "ranks", "others", "expected"),
    [
        ("mesh_dp", [0, 2], [("mesh_tp", [0, 1])], "mesh_dp"),
        # Each rank has its own groups of a dimension.
        ("mesh_dp", [0, 2], [("mesh_dp", [1, 3])], "mesh_dp"),
        # The word is in the other's description, too.
        ("mesh_dp", [0, 2], [("flattened mesh_dp", [0, 1, 2, 3])], "0-2/2"),
        ("", [0, 1], [("", [0, 1, 2, 3])], "0-1"),
        ("", [1, 0], [], "0-1"),
        ("", [0, 1], [("", [0, 1])], "0-1"),
        ("", [0, 1], [("tp", [0, 1])], ""),
        ("", [0, 1, 5], [], ""),
        ("a:b", [0, 4], [], "0-4/4"),
        ("", [], [], ""),
    ],
)
def test_what_stands_for_a_process_group(
    description: str, ranks: Sequence[int], others: Sequence[tuple[str, Sequence[int]]], expected: str
) -> None:
    assert scope_of(description, ranks, others) == expected
