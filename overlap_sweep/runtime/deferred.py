"""What the launcher does for other points while the ranks measure one: it reports the last, and prepares the next.

All in the main thread, between sending a point and waiting for the answers. So signals and errors go the usual way, and
what was deferred is done in its order.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from overlap_sweep.runtime.outcome import outcomes

_waiting: deque[tuple[Path, Callable[[], object]]] = deque()


class _Deferring:
    """Whether anything is deferred. Global, since the task that Hydra calls is far below who knows of a next point."""

    is_on = False


_deferring = _Deferring()


@contextmanager
def deferring() -> Iterator[None]:
    """Has `later` defer inside the block. All is done when it ends, however it ends."""
    _deferring.is_on = True
    try:
        yield
    finally:
        _deferring.is_on = False
        catch_up()


def later(directory: Path, act: Callable[[], object]) -> None:
    """Calls it for the point of this directory, inside of `deferring` once the ranks have something to measure. A point
    whose file cannot be written then is given up."""
    if _deferring.is_on:
        _waiting.append((directory, act))
    else:
        act()


def catch_up() -> None:
    """Does what was deferred."""
    while _waiting:
        directory, act = _waiting.popleft()
        try:
            act()
        except OSError as error:
            outcomes.give_up(directory, error)
