"""Settings that tests write."""

from overlap_sweep.nccl.settings import GroupSetting
from overlap_sweep.nccl.written import Written, written

TP = GroupSetting(description="TENSOR_MODEL_PARALLEL_GROUP", ranks=(0, 1), nodes=1, max_ctas=8, min_ctas=4)
DP = GroupSetting(description="DATA_PARALLEL_GROUP_WITH_CP", size=4, max_ctas=2, high_priority=True, cga_cluster_size=2)
EVERYWHERE = GroupSetting(max_ctas=16, algorithm="ring", protocol="simple", high_priority=True)
LARGE = GroupSetting(
    description="DATA_PARALLEL_GROUP_WITH_CP",
    size=4,
    collective="reduce_scatter",
    min_bytes=1 << 20,
    max_ctas=4,
    algorithm="ring",
    protocol="ll128",
)


def one(form: str, *settings: GroupSetting, multicast: bool = False, nccl: str = "2.31.2") -> Written:
    (found,) = written(settings, [form], multicast=multicast, nccl=nccl)
    return found
