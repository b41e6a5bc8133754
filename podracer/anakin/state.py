"""The state of an Anakin run, and what it begins with."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from podracer.acting import unroll
from podracer.config import Config
from podracer.config.sizes import Sizes
from podracer.distributed import mesh as mesh_lib
from podracer.learning.selection import Scores
from podracer.training import builder
from podracer.types import Array, ArrayTree, Leaf, TrainState


class AnakinState(struct.PyTreeNode):
    """All state of an Anakin run, which is what a checkpoint holds.

    If several agents learn at once, they are the first axis of every array, and spread over the
    groups of devices. If groups average, ``rollout``, ``source`` and the optimizer's state in
    ``train`` have such an axis, of the groups; what else is in ``train`` is their average.

    Attributes:
      train: the learner's state, the same on every device of a group.
      rollout: the environments, sharded over the devices of a group.
      source: the state of the agent's ``Source``, sharded with the environments.
      key: the run's random key. It never changes: every other key is folded from it and
        ``train.step``.
      settings: the settings in which the agents of a sweep differ, by dotted name; only a selection
        changes them.
      alive: ``[]`` bool, false once an agent has diverged, which from then on does not learn; if
        there is only one agent, whose run ends then, ``()``.
      scores: how agents have done since the last selection; ``()`` in runs without selections.
      outer: the state of the outer optimizer of groups that average, see ``learning.averaging``;
        else ``()``.
    """

    train: TrainState
    rollout: unroll.RolloutState
    source: ArrayTree
    key: Array
    settings: dict[str, Array] = struct.field(default_factory=dict)
    alive: Leaf = ()
    scores: Scores | tuple[()] = ()
    outer: ArrayTree = ()


def state_specs(sizes: Sizes) -> Any:
    """How the state is sharded over the mesh."""
    several, groups = sizes.learners > 1, sizes.learners > sizes.num_agents
    environments: Any = mesh_lib.AGENTS_SHARDED if several else mesh_lib.SHARDED
    rest: Any = mesh_lib.AGENTS if sizes.num_agents > 1 else mesh_lib.REPLICATED
    train: Any = TrainState(rest, rest, mesh_lib.AGENTS if groups else rest, rest)
    return AnakinState(train, environments, environments, rest, rest, rest, rest, rest)


class Start(NamedTuple):
    """What an agent begins with, or several agents, which are the first axis then.

    Attributes:
      key: its random key, ``[]``.
      settings: see ``AnakinState``.
    """

    key: Array
    settings: dict[str, Array]


def make_start(config: Config, platform: str = "") -> Start:
    """What the agents of a run begin with; ``platform`` is that of ``prng.key``."""
    agents = config.members
    settings = {
        name: jnp.array([x.settings[name] for x in agents], jnp.float32)
        for name in agents[0].settings
    }
    if len(agents) == 1:
        settings = {name: x[0] for name, x in settings.items()}
    return Start(builder.run_keys([x.seed for x in agents], platform), settings)
