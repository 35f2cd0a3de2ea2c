"""Transformer Engine's recipes for FP8 and FP4: the sizes that each requires, and what its userbuffers overlap with it.

As in Transformer Engine 2.20: sizes in pytorch/utils.py, pytorch/csrc/quantizer.cpp and common/gemm/cublaslt_gemm.cu,
gathers in pytorch/distributed.py, overlap in pytorch/module/base.py and common/comm_gemm_overlap.
"""

from dataclasses import dataclass

from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.space import Setting, method_of


@dataclass(frozen=True)
class Recipe:
    """How tensors are quantised for the GEMMs of a precision."""

    precision: str
    number_format: str
    """Name of the number format in sentences."""
    made_by: str
    """Class in transformer_engine.common.recipe."""
    available: str
    """Function of transformer_engine.pytorch that says whether the GPU has it, and why not."""
    calibration_steps: int = 1
    """Steps until weights are quantised and scales have settled."""
    scaled_per_tensor: bool = False
    """Whether a tensor has one scale, otherwise one for each block of it."""
    features: int = 16
    """Divisor of each rank's inputs and outputs."""
    rows: int = 8
    """Divisor of each rank's tokens."""
    tokens: int = 16
    """Divisor of all tokens, along which the weight's gradient is summed."""
    gathered: int = 1
    """Divisor of both dimensions of a gathered tensor, which is otherwise gathered in bf16."""
    split: int = 16
    """Divisor of the columns of a pipeline's chunks."""
    chunk: int = 1
    """Divisor of both dimensions of other chunks that userbuffers cut tensors into."""
    without_overlap: str = ""
    """Why Transformer Engine overlaps nothing but `overlapped`; empty if it overlaps everything."""
    overlapped: frozenset[tuple[str, str]] = frozenset()
    """Phases and methods that overlap even so."""

    def sizes_refusal(self, shape: LinearShape) -> str | None:
        """Returns why the operator's GEMMs or gathers cannot be in this format, or None."""
        needs = f"{self.number_format} GEMMs require"
        (outputs, inputs), rows = shape.weight_shape, shape.tokens // shape.tp_size
        for divided, size, divisor, have in (
            ("dimensions", outputs, self.features, f"a rank has {outputs} outputs"),
            ("dimensions", inputs, self.features, f"a rank has {inputs} inputs"),
            ("rows", rows, self.rows, f"a rank has {rows} tokens"),
            ("tokens", shape.tokens, self.tokens, f"there are {shape.tokens}"),
        ):
            if size % divisor:
                return f"{needs} {divided} divisible by {divisor}, but {have}"
        gathered = rows, shape.in_features if shape.parallel == "column" else shape.out_features
        if shape.tp_size > 1 and any(size % self.gathered for size in gathered):
            return (
                f"Transformer Engine gathers tensors with precision={self.precision} in {self.number_format} only if "
                f"their dimensions are divisible by {self.gathered}, but a rank has {rows} tokens x {gathered[1]}"
            )
        return None

    def overlap_refusal(self, slot: str, setting: Setting, shape: LinearShape) -> str | None:
        """Returns why userbuffers cannot overlap a slot by its method in this format, or None."""
        phase, method = slot.partition("_")[2], method_of(setting)
        if self.without_overlap and (phase, method) not in self.overlapped:
            return self.without_overlap
        for name, size in _chunk(phase, method, shape).items():
            if size % self.chunk:
                return (
                    f"{slot}: userbuffers require {self.number_format} chunks with dimensions divisible by "
                    f"{self.chunk}, but they have {size} {name}"
                )
        return None


def _chunk(phase: str, method: str, shape: LinearShape) -> dict[str, int]:
    """Returns the sizes of the chunks that userbuffers gather or multiply under this method, by name."""
    outputs, inputs = shape.weight_shape
    rows, summed = {"rows": shape.tokens // shape.tp_size}, {"columns": outputs if phase == "dgrad" else inputs}
    if method == "bulk":
        # The bulk reduce-scatter of wgrad moves bf16.
        return rows if phase == "dgrad" else {}
    return summed if method == "pipeline" else {**rows, **summed}


RECIPES = {
    recipe.precision: recipe
    for recipe in (
        # Its first step uses scales of 1, the second those of the first step's weights and activations; gradients
        # follow one step later.
        Recipe("fp8_delayed", "FP8", "DelayedScaling", "is_fp8_available", calibration_steps=3, scaled_per_tensor=True),
        Recipe("fp8_current", "FP8", "Float8CurrentScaling", "is_fp8_available", scaled_per_tensor=True),
        Recipe(
            "fp8_block",
            "FP8",
            "Float8BlockScaling",
            "is_fp8_block_scaling_available",
            gathered=128,
            without_overlap="Transformer Engine's userbuffers neither gather nor split tensors with "
            "precision=fp8_block, so only qkv_wgrad and fc1_wgrad overlap, by bulk",
            overlapped=frozenset({("wgrad", "bulk")}),
        ),
        Recipe(
            "mxfp8",
            "MXFP8",
            "MXFP8BlockScaling",
            "is_mxfp8_available",
            features=32,
            rows=32,
            tokens=32,
            split=128,
            chunk=128,
        ),
        Recipe(
            "nvfp4",
            "NVFP4",
            "NVFP4BlockScaling",
            "is_nvfp4_available",
            features=32,
            rows=16,
            tokens=32,
            without_overlap="Transformer Engine's userbuffers have no NVFP4 GEMMs, so nothing overlaps with "
            "precision=nvfp4",
        ),
    )
}


def notes(precision: str) -> list[str]:
    """Returns a sentence on what cannot be overlapped in the precision; empty if everything can."""
    recipe = RECIPES.get(precision)
    return [f"{recipe.without_overlap}."] if recipe and recipe.without_overlap else []
