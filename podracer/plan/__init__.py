"""Plans runs for TPU slices with the TPU compiler, on a machine without a TPU."""

from podracer.plan.chips import get_slice
from podracer.plan.estimate import Plan, make_plan

__all__ = ["Plan", "get_slice", "make_plan"]
