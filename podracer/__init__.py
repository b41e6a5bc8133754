"""podracer: reinforcement learning on TPU pods, GPUs and laptops.

``podracer.train("gymnax:CartPole-v1", total_steps=500_000)`` trains in one line. With a
configuration of your own, ``podracer.anakin.train(config, workdir)`` trains in environments written
in JAX and ``podracer.sebulba.train(config, workdir)`` in host (CPU) environments;
``podracer.config.default_config()`` returns a configuration to start from,
``podracer.evaluate.evaluate(workdir)`` evaluates a saved run, and ``podracer.load_policy(workdir)``
returns its policy.
"""

# Importing JAX takes a second, so everything that needs it is imported where it is first used.
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etils import epath

    from podracer import anakin, config, evaluate, sebulba
    from podracer.training.loop import Result
    from podracer.training.saved_run import load_policy

__all__ = ["anakin", "config", "evaluate", "load_policy", "sebulba", "train"]
# The version is defined here only; pyproject.toml reads it.
__version__ = "0.1.0"
_MODULES = ("anakin", "config", "evaluate", "sebulba")


def __getattr__(name: str) -> Any:
    """Imports what is public when it is first used."""
    if name in _MODULES:
        return importlib.import_module(f"podracer.{name}")
    if name == "load_policy":
        return importlib.import_module("podracer.training.saved_run").load_policy
    raise AttributeError(f"module 'podracer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES, "load_policy"]


def train(
    env: str,
    *,
    agent: str = "ppo",
    workdir: "epath.PathLike | None" = None,
    quiet: bool = False,
    **settings: Any,
) -> "Result":
    """Trains an agent in an environment.

    Anakin trains in environments written in JAX, Sebulba in host (CPU) environments::

        result = podracer.train("gymnax:CartPole-v1", total_steps=500_000, ppo={"clip": 0.1})
        action = result.policy(observation)

    Args:
      env: the environment, as "suite:name", or as "module:Class" for one of your own.
      agent: the algorithm, such as "ppo", "vtrace" or "dqn".
      workdir: folder of the run, or gs://BUCKET/FOLDER; a run that it holds is resumed. None saves
        nothing.
      quiet: print nothing.
      **settings: any other setting of ``config.Config``, with sections as dictionaries, and any
        other option of ``training.options.Options``. Settings left out keep their defaults.

    Returns:
      The trained weights, all rows of metrics, the summary and the trained policy.

    Raises:
      ConfigError: an impossible setting, or an unknown one, before anything compiles.
      Exception: as ``anakin.train`` and ``sebulba.train`` do.
    """
    import dataclasses

    from podracer import anakin, envs, sebulba
    from podracer.config import Config, parse
    from podracer.errors import unknown
    from podracer.training.options import Options

    names, options = ({f.name for f in dataclasses.fields(cls)} for cls in (Config, Options))
    for name in settings:
        if name not in names | options:
            raise unknown("setting", name, names | options)
    given = {name: settings.pop(name) for name in options & settings.keys()}
    parsed = parse({"env": env, "agent": agent, **settings})
    trainer = anakin if envs.architecture(env) == "anakin" else sebulba
    return trainer.train(parsed, workdir, quiet=quiet, **given)
