"""As much of megatron.bridge.training.comm_overlap as a preset needs, for machines without Megatron-Bridge.

Names, fields, defaults and what becomes of them are those of 0.6.2; test_exports.py compares it with the real one.
"""

from dataclasses import asdict, dataclass, make_dataclass
from typing import Any

BulkOverlapCfg = make_dataclass("BulkOverlapCfg", ["num_sm", "cga_size", "set_sm_margin", ("method", str, "bulk")])
PipelineOverlapCfg = make_dataclass(
    "PipelineOverlapCfg",
    [
        *("num_sm", "cga_size", "num_splits", "set_sm_margin"),
        *(("fp8_buf", Any, (False,)), ("atomic_gemm", bool, False), ("method", str, "pipeline")),
    ],
)


@dataclass
class RingExchangeOverlapCfg:
    aggregate: bool = False
    method: str = "ring_exchange"
    num_sm: int = 1
    cga_size: int = 1
    set_sm_margin: bool = False
    fp8_buf: bool = False
    atomic_gemm: bool = False


TransformerLayerTPOverlapCfg = make_dataclass(
    "TransformerLayerTPOverlapCfg",
    [
        *("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad", "qkv_fprop"),
        *("proj_dgrad", "fc1_fprop", "fc2_dgrad", "proj_fprop", "fc2_fprop"),
    ],
)


@dataclass(kw_only=True)
class CommOverlapConfig:
    tp_comm_overlap: bool
    tp_comm_overlap_cfg: Any = None
    tp_comm_bootstrap_backend: str | None = "nccl"
    data_parallel_size: int | None = None

    def finalize(self) -> None:
        pass

    def setup(self, model: Any, optimizer: object, ddp: object) -> None:
        can = model.tensor_model_parallel_size > 1 and model.sequence_parallel
        model.tp_comm_overlap = self.tp_comm_overlap and can
        model.tp_comm_overlap_cfg = None
        if model.tp_comm_overlap and self.tp_comm_overlap_cfg:
            slots = asdict(self.tp_comm_overlap_cfg)
            model.tp_comm_overlap_cfg = {slot: setting for slot, setting in slots.items() if setting is not None}
