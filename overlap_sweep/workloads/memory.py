"""Estimates the memory that a point's ranks need, from sizes alone, and says where a machine has too little.

An estimate has what every training run holds: libraries, communication buffers and fragmentation come on top, so a
point within it may still run out of memory. A point is refused only if not even its parameters fit.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from overlap_sweep.config import SIZES, Model

_GB = 1e9
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of this process's container."""
ADAM_BYTES = 8
"""Two float32 moments of each parameter."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they hold."""

    parameters: float
    """In every type in which they are held at the same time."""
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """What the forward pass keeps for the backward pass, and the logits."""

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        return ", ".join(f"{name} {size / _GB:,.1f}" for name, size in vars(self).items() if size)


@dataclass(frozen=True)
class DenseLayer:
    """The sizes of a dense layer, by the names of a point's `model`."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    gated_mlp: bool

    @classmethod
    def of(cls, model: Model) -> Self:
        """Returns the layer of a resolved model with dense layers."""
        return cls(**{name: getattr(model, name) for name in SIZES})

    @property
    def _heads(self) -> int:
        """Returns the width of queries, attention's output, keys and values together."""
        return (2 * self.num_attention_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def parameters(self) -> int:
        """Returns the parameters in its GEMMs."""
        return self.hidden_size * (self._heads + (3 if self.gated_mlp else 2) * self.ffn_hidden_size)

    def activations(self, tp_size: int = 1, sequence_parallel: bool = True) -> float:
        """Returns the elements that it keeps for each token on each tensor-parallel rank: inputs and outputs of the
        norms and of both residuals, queries, keys, values and the attention's output, and what its MLP multiplies
        (arXiv:2205.05198, section 4, without dropout and with an attention that keeps no scores)."""
        cut = self._heads + (4 if self.gated_mlp else 2) * self.ffn_hidden_size
        return 6 * self.hidden_size / (tp_size if sequence_parallel else 1) + cut / tp_size


def host_bytes() -> int:
    """Returns the memory of this machine, or of its container if that has a limit."""
    found = re.search(r"^MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    sizes = [1024 * int(found[1])]
    for path in _LIMITS:
        # Without a limit the file is missing, or says max.
        with suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def refusal(memory: Memory, ranks: int, available_bytes: int, place: str, fewer: str) -> str | None:
    """Returns why `ranks` ranks cannot even hold their parameters at a place, such as `this machine`, or None. `fewer`:
    what needs less."""
    needed = ranks * memory.parameters
    if needed <= available_bytes:
        return None
    of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
    return (
        f"the parameters{of_ranks} alone need {needed / _GB:,.1f} GB, and {place} has {available_bytes / _GB:,.1f}; "
        f"use {fewer}"
    )


def warning(memory: Memory, ranks: int, available_bytes: int, place: str, fewer: str) -> str | None:
    """Returns that the ranks may run out of memory, in a sentence, or None."""
    needed = ranks * memory.total
    if needed <= available_bytes:
        return None
    of_each = f", each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"may run out of memory: about {needed / _GB:,.1f} GB are needed, and {place} has {available_bytes / _GB:,.1f} "
        f"(in GB{of_each}: {memory}); if it fails, use {fewer}"
    )
