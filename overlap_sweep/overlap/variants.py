"""What the ways to run a whole layer are called: in results, and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

NONE, DEFAULT, TUNED, FLOOR = "none", "default", "tuned", "floor"
"""No overlap; the library's own; what a tuner came to; the GEMMs without communication."""
FILE = "file:"
"""Begins the name of a variant whose configuration is a file; its path follows."""
ASYNC_TP_BACKEND = "symm_mem"
"""Its default overlap is PyTorch's async TP."""


def named(variant: str, backend: str) -> str:
    """Returns a variant's name for people."""
    return "async TP" if variant == DEFAULT and backend == ASYNC_TP_BACKEND else variant


def without_folders(variants: Iterable[str]) -> dict[str, str]:
    """Returns by variant `file:best.yaml` for `file:/a/b/best.yaml`: sweeps keep their files in folders of their own.
    Those that would be called the same keep their folders."""
    short = {one: FILE + PurePath(one.removeprefix(FILE)).name if one.startswith(FILE) else one for one in variants}
    count = Counter(short.values())
    return {variant: name if count[name] == 1 else variant for variant, name in short.items()}
