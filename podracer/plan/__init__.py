"""Plans a run for a TPU slice that is not there yet, with the real TPU compiler."""

from podracer.plan.chips import get_slice
from podracer.plan.estimate import Plan, make

__all__ = ["Plan", "get_slice", "make"]
