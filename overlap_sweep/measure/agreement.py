"""Whether two variants compute the same."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.variant import Variant


def relative_error(candidate: Variant, reference: Variant, ranks: Ranks) -> dict[str, float]:
    """Largest difference of each tensor over the reference's largest magnitude, over all ranks; inf for NaN.

    Two inputs follow each other, so that what reads the last call's buffer instead of waiting for this one's is found.
    """
    errors: dict[str, Tensor] = {}
    for repeat in range(2):
        ours, theirs = (_results(variant, repeat) for variant in (candidate, reference))
        for name, expected in theirs.items():
            difference = (ours[name].float() - expected.float()).abs().max()
            error = torch.nan_to_num(difference / expected.float().abs().max(), nan=torch.inf, posinf=torch.inf)
            # Zeros equal zeros.
            error = torch.where(difference == 0, difference, error)
            errors[name] = torch.maximum(error, errors[name]) if name in errors else error
    return dict(zip(errors, ranks.slowest(torch.stack(list(errors.values())).tolist()), strict=True))


def _results(variant: Variant, repeat: int) -> dict[str, Tensor]:
    assert variant.backward
    output = variant.forward(repeat)
    return {"output": output.detach(), **variant.backward(repeat, output)}
