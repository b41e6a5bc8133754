"""Sebulba: environments on the host, actor threads, and devices split into actors and learners."""

from podracer.sebulba.train import train

__all__ = ["train"]
