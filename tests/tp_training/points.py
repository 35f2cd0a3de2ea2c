"""The points of workload=tp_training."""

from tests.training.points import composed, tp_point

__all__ = ["composed", "tp_point"]
