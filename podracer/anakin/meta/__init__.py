"""Learning an update rule: many agents in one program, and a gradient through what they learn."""

from podracer.anakin.meta.trainer import train

__all__ = ["train"]
