"""Tables of tensor-parallel stacks: points, settings, and the best of each case."""

from operator import attrgetter

from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.numbers import as_loss, as_percent
from overlap_sweep.report.table import DEVICE, MODEL, PRECISION, Column, PointRow, Table, asked, attribute, through
from overlap_sweep.study.section import NOISE, case_columns, setting_of_point, tables
from overlap_sweep.workloads.tp_training.config import Asked
from overlap_sweep.workloads.tp_training.rows import NAMING, StepCommunication, TpTrainingRow, options_of

C = Column[TpTrainingRow]
P = Column[PointRow[TpTrainingRow]]


def _share(name: str, part: str, header: str, dropped: int) -> C:
    """Returns the column of the share of the step that a part of it takes."""
    return C(f"{name}_fraction", lambda row: row.shares[part], show=as_percent, header=header, dropped=dropped)


COMMUNICATION: tuple[Column[StepCommunication], ...] = (
    attribute(
        "comm_us",
        "Communication time in one profiled step, on the rank that waits least for the others.",
        read="total_us",
        header="comm us",
        dropped=2,
    ),
    attribute(
        "exposed_comm_us",
        "Part of comm_us with no concurrent computation.",
        read="exposed_us",
        header="exposed us",
        dropped=6,
    ),
    attribute("hidden_fraction", header="hidden", show=as_percent, dropped=5, high_first=True),
    attribute(
        "comm_wait_us",
        "Additional communication time of the rank that waits most for the others.",
        read="waiting_us",
    ),
)
"""Columns of the communication in a step, empty without traces."""
SIZES = ("seq_length", "batch_size", "gradient_accumulation_steps")
ASKED = (
    MODEL,
    asked("num_layers", kind="count"),
    DEVICE,
    PRECISION,
    *(asked(name, "tp_training", name, kind="count") for name in SIZES),
    asked("impl", kind="text"),
    setting_of_point(lambda point: NAMING.in_words(options_of(point.config_as(Asked)))),
    asked("tp_size", kind="count", header="TP"),
    asked("dp_size", kind="count", header="DP"),
    NODES,
)
MEASURED = (
    attribute(
        "time_us",
        "Time of one training step: median of the steps after warm-up, of the slowest rank.",
        header="time us",
    ),
    NOISE,
    C("repeats", attrgetter("step.repeats"), "Number of timed steps.", "count"),
    _share("fwd", "forward", "fwd", dropped=7),
    _share("bwd", "backward", "bwd", dropped=8),
    _share("optimizer", "optimizer", "opt", dropped=4),
    attribute("tokens_per_s_per_gpu", header="tokens/s/GPU", show="{:,.0f}".format, high_first=True),
    attribute("tflops_per_gpu", header="TFLOP/s/GPU", show="{:,.3g}".format, high_first=True, page_only=True),
    attribute(
        "mfu",
        "Model FLOP utilisation: tflops_per_gpu over the GPU's dense peak; empty if that is unknown.",
        header="MFU",
        show="{:.1%}".format,
        dropped=9,
        high_first=True,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=3),
    *(through(column, lambda row: row.times.communication) for column in COMMUNICATION),
    attribute(
        "loss",
        "Loss of the last step; empty if it is NaN or infinite.",
        header="loss",
        words=lambda row: "-" if row.loss is None else as_loss(row.loss),
        dropped=1,
    ),
    C(
        "losses_agree",
        lambda row: None if row.losses is None else not row.deviates,
        "Losses agree with those of the other stacks on the same data; empty if there are none.",
        "flag",
        queried=True,
    ),
    C(
        "loss_difference",
        lambda row: row.losses.largest if row.losses else None,
        "Largest relative difference between its loss and the other stacks' at the same step.",
    ),
)
RESULTS: Table[TpTrainingRow] = Table(
    "tp_training", "one row per point", (*MEASURED, attribute("launch_bound", kind="flag"))
)
"""What results_*.json has of a point."""
TABLE, COMPARED, ANSWERS = tables(
    "tp_training",
    (
        *case_columns(("model", "device", "precision"), ("num_layers", *SIZES, "nodes")),
        *(attribute(name, kind="count", read=f"best.config.{name}") for name in ("tp_size", "dp_size")),
        attribute("impl", kind="text", read="best.config.impl"),
    ),
    ASKED,
    MEASURED,
    reference="the setting that was started first",
)
