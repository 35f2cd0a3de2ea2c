from dataclasses import dataclass, field

from overlap_sweep.config import OF_OPERATORS, TensorParallelConfig
from overlap_sweep.declared import ranged


@dataclass
class WorkloadOptions:
    name: str = "toy"
    tokens: int | None = ranged(None, 1, 2**24)
    warmup: int = ranged(1, 0, 1000)
    repeats: int | None = ranged(None, 2, 1000)


@dataclass
class Toy:
    chunks: int = ranged(1, 1, 64)
    """Into how many parts the output is cut, each an all-reduce of its own."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    toy: Toy = field(default_factory=Toy)
    reads_of_model = OF_OPERATORS
