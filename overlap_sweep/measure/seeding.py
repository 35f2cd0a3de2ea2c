"""Random streams that have nothing to do with each other: weights equal to inputs would multiply to outliers."""

from __future__ import annotations

import hashlib

import torch


def stream_seed(seed: int, what: str, rank: int | None = None) -> int:
    """A seed of its own for everything that is drawn; without a rank the same on all of them."""
    digest = hashlib.sha256(f"{seed} {what} {rank}".encode()).digest()
    return int.from_bytes(digest[:6])


def stream(device: torch.device, seed: int, what: str, rank: int | None = None) -> torch.Generator:
    return torch.Generator(device).manual_seed(stream_seed(seed, what, rank))
