"""What NCCL should use for a process group, for one of its collectives, or for buffers of some sizes.

Facts of NCCL 2.30 (src/graph/tuning.cc) and Megatron-Core 0.16 (parallel_state).
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from overlap_sweep.errors import UserError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
"""Those whose algorithm NCCL chooses."""
Algorithm = Literal["ring", "tree", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]

ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree", "collnet_direct", "collnet_chain", "nvls", "nvls_tree"),
    "all_gather": ("ring", "collnet_direct", "nvls", "pat"),
    "reduce_scatter": ("ring", "collnet_direct", "nvls", "pat"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
}
"""The algorithms that NCCL has for each collective."""
WITH_MULTICAST = ("nvls", "nvls_tree")
ANY_SIZE = 2**64 - 1
MOST_CTAS = 32
"""Most thread blocks, where only the fewest are asked for: NCCL (2.28) refuses options that say these alone."""

MEGATRON_GROUPS = {
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp",
    "HYBRID_DP_CP_GROUP_*": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L*": "hcp",
    "MODEL_PARALLEL_GROUP": "mp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ep_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep_mp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "ep_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_ep_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_ep_dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt_instance",
}
"""By the description that a trace has of one of Megatron-Core's groups (`*` for numbers), the name that its
`nccl_communicator_config_path` has for it."""

Positive = Annotated[int, Meta(ge=1)]
KNOBS = ("high_priority", "cga_cluster_size", "max_ctas", "min_ctas", "cta_policy", "algorithm", "protocol")


def is_older(nccl: str, since: tuple[int, int]) -> bool:
    """Returns whether a version of NCCL, such as 2.28.9, is older, or unknown."""
    return [*map(int, re.findall(r"\d+", nccl)[:2])] < [*since]


class GroupSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What NCCL should use for the collectives that are named here; null is what NCCL chooses."""

    description: str = ""
    """Description of the group, as traces have it, or Megatron-Core's name for it. Without one, and without ranks and
    size, it is for all groups."""
    ranks: tuple[int, ...] = ()
    """Of the group; may be left out where several groups have the description."""
    size: Positive | None = None
    """Ranks of each of the groups; by default as many as there are `ranks`."""
    nodes: Positive | None = None
    """Of the group; null is any number."""
    collective: Collective | None = None
    """null is all of them."""
    min_bytes: int = 0
    max_bytes: int | None = None
    """Size of the buffer, that of all ranks together in all-gathers and reduce-scatters. Both ends are included."""
    high_priority: bool | None = None
    cga_cluster_size: Annotated[int, Meta(ge=0, le=8)] | None = None
    max_ctas: Positive | None = None
    min_ctas: Positive | None = None
    cta_policy: Literal[0, 1, 2] | None = None
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None

    def __post_init__(self) -> None:
        if self.algorithm and not self.collectives:
            allowed = ", ".join(ALGORITHMS[self.collective]) if self.collective else ""
            raise UserError(f"NCCL has no {self.algorithm} for {self.collective}; give one of {allowed}.")
        if self.max_ctas is not None and self.min_ctas is not None and self.min_ctas > self.max_ctas:
            raise UserError(f"{self.group}: min_ctas={self.min_ctas} exceeds max_ctas={self.max_ctas}; lower it.")

    @property
    def group(self) -> str:
        """Returns what to call the group."""
        ranks = f"ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return self.description or ranks or (f"groups of {self.size} ranks" if self.size else "all groups")

    @property
    def label(self) -> str:
        """Returns what to call all that the setting is for."""
        sizes = f"{self.min_bytes} {'bytes or more' if self.max_bytes is None else f'to {self.max_bytes} bytes'}"
        return ", ".join(filter(None, (self.group, self.collective, "" if self.is_any_size else sizes)))

    @property
    def is_for_all_groups(self) -> bool:
        return not self.description and not self.ranks and self.size is None

    @property
    def is_any_size(self) -> bool:
        return not self.min_bytes and self.max_bytes is None

    @property
    def last_byte(self) -> int:
        return ANY_SIZE if self.max_bytes is None else self.max_bytes

    @property
    def group_size(self) -> int | None:
        return self.size or len(self.ranks) or None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Returns those that it is for: of all, those for which NCCL has the algorithm."""
        asked: tuple[Collective, ...] = (self.collective,) if self.collective else tuple(ALGORITHMS)
        return tuple(one for one in asked if not self.algorithm or self.algorithm in ALGORITHMS[one])

    @property
    def megatron_name(self) -> str | None:
        """Returns Megatron-Core's name of the group; None if it is not one of its groups."""
        if self.description in MEGATRON_GROUPS.values():
            return self.description
        return next((name for pattern, name in MEGATRON_GROUPS.items() if fnmatchcase(self.description, pattern)), None)

    @property
    def knobs(self) -> dict[str, int | str]:
        """Returns what is set, by field."""
        return {name: value for name in KNOBS if (value := getattr(self, name)) is not None}

    def overlaps(self, other: GroupSetting) -> bool:
        """Returns whether both may be for one call, if they are for the same group."""
        in_common = {*self.collectives} & {*other.collectives}
        return bool(in_common) and self.min_bytes <= other.last_byte and other.min_bytes <= self.last_byte
