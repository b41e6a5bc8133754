"""podracer: reinforcement learning on TPU pods, GPUs and laptops.

``podracer.anakin.train(config, workdir)`` and ``podracer.sebulba.train(config, workdir)`` train
from Python; ``podracer.config.default_config()`` gives a configuration to start from, and
``podracer.evaluate.evaluate(workdir)`` judges what was learned.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podracer import anakin, config, evaluate, sebulba

__all__ = ["anakin", "config", "evaluate", "sebulba"]


def __getattr__(name: str) -> ModuleType:
    """Loads what is named in ``__all__`` when it is first used: JAX takes a second."""
    if name in __all__:
        return importlib.import_module(f"podracer.{name}")
    raise AttributeError(f"module 'podracer' has no attribute {name!r}")
