"""What GPUs compute at most, by their names: what a rate is a share of in model FLOP utilisation."""

from __future__ import annotations

import re
from typing import NamedTuple


class PeakRate(NamedTuple):
    """Dense, without sparsity, of one GPU in TFLOP/s. float32 is that of the vector units: no TF32."""

    bf16: float | None
    fp16: float | None
    fp32: float


_PEAKS = {
    r"GB[23]00": PeakRate(2500.0, 2500.0, 80.0),
    r"B[23]00": PeakRate(2250.0, 2250.0, 75.0),
    r"H[12]00 NVL": PeakRate(835.5, 835.5, 60.0),
    r"H[18]00 PCIe": PeakRate(756.0, 756.0, 51.0),
    r"(GH200|H100|H200|H800)": PeakRate(989.4, 989.4, 66.9),
    r"H20": PeakRate(148.0, 148.0, 44.0),
    r"A[18]00": PeakRate(312.0, 312.0, 19.5),
    r"L40S": PeakRate(362.0, 362.0, 91.6),
    r"L40": PeakRate(181.0, 181.0, 90.5),
    r"L4": PeakRate(121.0, 121.0, 30.3),
    r"A10": PeakRate(125.0, 125.0, 31.2),
    r"V100-PCIE": PeakRate(None, 112.0, 14.0),
    r"V100": PeakRate(None, 125.0, 15.7),
    r"MI355X": PeakRate(2516.6, 2516.6, 157.3),
    r"MI350X": PeakRate(2306.9, 2306.9, 144.2),
    r"MI3(00|25)X": PeakRate(1307.4, 1307.4, 163.4),
    r"MI300A": PeakRate(980.6, 980.6, 122.6),
}
"""By a word of the name, the first that fits. Of NVIDIA's data sheets (Blackwell: HGX B200 and B300, GB200 and
GB300; Hopper: H100, H200, H20; Ampere: A100, A10; Ada: L40S, L40, L4; Volta: V100), whose rates with sparsity are
halved, and of AMD's (MI300X, MI325X, MI300A, MI350X, MI355X). At the boost clock, which a GPU under such load does not
hold."""


def peak_tflops(gpu: str | None, precision: str) -> float | None:
    """`gpu` as torch names it, such as `NVIDIA H100 80GB HBM3`; `precision`: bf16, fp16 or fp32. None where it is not
    known."""
    for word, peak in _PEAKS.items():
        if gpu and re.search(rf"\b{word}\b", gpu):
            return peak._asdict().get(precision)
    return None
