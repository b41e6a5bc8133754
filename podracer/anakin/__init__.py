"""Anakin: environments written in JAX, and everything else, in one compiled program."""

from podracer.anakin.trainer import train

__all__ = ["train"]
