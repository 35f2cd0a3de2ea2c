"""What of an interruption is left when a library fails while it tidies up."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from overlap_sweep.errors import was_interrupted


@contextmanager
def tidying() -> Iterator[None]:
    try:
        yield
    finally:
        raise AttributeError("half a change is there")


@pytest.mark.parametrize(("raised", "interrupted"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_error_of_an_interruption_is_one(raised: type[BaseException], interrupted: bool) -> None:
    with pytest.raises(AttributeError) as caught, tidying():
        raise raised
    assert was_interrupted(caught.value) is interrupted
