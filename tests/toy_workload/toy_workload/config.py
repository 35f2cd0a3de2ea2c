from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from overlap_sweep.config import OF_OPERATORS, ResolvedModel, ResolvedPoint, TensorParallelConfig
from overlap_sweep.declared import resolved


@dataclass
class WorkloadOptions:
    name: str = "toy"
    tokens: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    warmup: Annotated[int, Meta(ge=0, le=1000)] = 1
    repeats: Annotated[int, Meta(ge=2, le=1000)] | None = None


@dataclass
class Toy:
    chunks: Annotated[int, Meta(ge=1, le=64)] = 1
    """Into how many parts the output is cut, each an all-reduce of its own."""


@dataclass
class Config(TensorParallelConfig):
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    toy: Toy = field(default_factory=Toy)
    reads_of_model = OF_OPERATORS


@resolved
class Resolved(Config, ResolvedPoint):
    model: ResolvedModel = field()
