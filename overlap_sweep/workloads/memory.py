"""Estimates the memory that a point's ranks need, from sizes alone, and says where a machine has too little.

An estimate has what every training run holds: libraries, communication buffers and fragmentation come on top, so a
point within it may still run out of memory. A point is refused only if not even its parameters fit.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep.config import Model, known

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


def layer_parameters(model: Model) -> int:
    """Returns the parameters in the GEMMs of a dense layer of a resolved model."""
    width = _heads_width(model) + (3 if model.gated_mlp else 2) * known(model.ffn_hidden_size)
    return known(model.hidden_size) * width


def layer_activations(model: Model, tp_size: int = 1, sequence_parallel: bool = True) -> float:
    """Returns the elements that a dense layer keeps for each token on each tensor-parallel rank: inputs and outputs of
    the norms and of both residuals, queries, keys, values and the attention's output, and what its MLP multiplies
    (arXiv:2205.05198, section 4, without dropout and with an attention that keeps no scores)."""
    cut = _heads_width(model) + (4 if model.gated_mlp else 2) * known(model.ffn_hidden_size)
    return 6 * known(model.hidden_size) / (tp_size if sequence_parallel else 1) + cut / tp_size


def _heads_width(model: Model) -> int:
    """Returns the width of all heads' queries, keys, values and outputs."""
    return 2 * (known(model.num_attention_heads) + known(model.num_kv_heads)) * known(model.head_dim)


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
