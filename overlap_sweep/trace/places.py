"""Where files really lie. A directory that somebody sent may hold links, and names that lead elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def is_below(path: Path, root: Path) -> bool:
    """Whether it lies there with all links followed; `root` itself may be one."""
    # Unlike Path.resolve it takes links that lead in circles.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_plain_name(name: str) -> bool:
    """Whether it is the name of something in a directory, and can be shown."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def is_special(path: Path) -> bool:
    """Whether reading it would wait for somebody to write, or never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def links_out(root: Path) -> Iterator[Path]:
    """Directories below `root` that are links to somewhere else. Nothing looks into them."""
    for folder, names, _ in os.walk(root):
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink() and not is_below(path, root):
                yield path
