"""Columns taken apart by their values, without going through the whole column for each value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def places_by_value(column: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each integer in the column, ascending, with the places where it stands, ascending."""
    order = np.argsort(column, kind="stable")
    values, first = np.unique(column[order], return_index=True)
    return zip(values.tolist(), np.split(order, first[1:]), strict=False)
