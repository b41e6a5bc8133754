"""Action masks: the part of an observation that says which actions are legal.

The state of the environment, which observations may hold for a search, is not for networks, either.

Networks apply them. The logit or value of an illegal action is ``ILLEGAL``, so that agents neither
sample such an action nor find it the best one, and need not know of masks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.types import ACTION_MASK, MODEL_STATE, Array, ArrayTree, Discrete, Spec

# So low that the probability is exactly 0, and finite, so that entropies and gradients are, too.
ILLEGAL = -1e9


def split(observation: ArrayTree) -> tuple[ArrayTree, Any]:
    """What networks see of an observation (or of its shapes), and the action mask; None if there
    is none."""
    if not isinstance(observation, dict):
        return observation, None
    hidden = (ACTION_MASK, MODEL_STATE)
    seen = {key: x for key, x in observation.items() if key not in hidden}
    return seen, observation.get(ACTION_MASK)


def legal(observation: ArrayTree) -> Array | None:
    """Which actions are legal, ``[..., actions]`` bool; None if observations have no mask.

    A mask that allows no action, as some environments show at the end of an episode, allows all:
    what is chosen there has no effect.
    """
    _, mask = split(observation)
    return None if mask is None else mask | ~mask.any(-1, keepdims=True)


def restrict(scores: Any, observation: ArrayTree) -> Any:
    """Logits or values ``[..., actions]``, in which illegal actions have the lowest ones."""
    allowed = legal(observation)
    return scores if allowed is None else jnp.where(allowed, scores, ILLEGAL)


def random_action(key: Array, allowed: Array | None, num_actions: int) -> Array:
    """One of the legal actions, each equally often.

    Args:
      key: random key.
      allowed: ``[actions]`` bool, see ``legal``.
      num_actions: number of actions.
    """
    if allowed is None:
        return jax.random.randint(key, (), 0, num_actions)
    place = jax.random.randint(key, (), 0, allowed.sum())
    # The first action with more than that many legal ones up to it.
    return (jnp.cumsum(allowed) > place).argmax(-1)


def check(spec: Spec) -> None:
    """Raises ``ConfigError`` if a mask is not one entry for each of a number of actions, or if
    there is nothing else to observe."""
    if not jax.tree.leaves(split(spec.observation)[0]):
        raise ConfigError(
            "networks need something to observe besides an action mask, but this environment "
            f"observes {spec.observation}"
        )
    for path, leaf in jax.tree.leaves_with_path(spec.observation):
        keys = [getattr(key, "key", None) for key in path]
        if ACTION_MASK not in keys[-1:] or keys[0] == MODEL_STATE:
            continue
        name = f"the observation{jax.tree_util.keystr(path)} of this environment"
        if len(path) > 1:
            raise ConfigError(
                f"{name} would not be used as an action mask: it must be at the top, as "
                f"observation[{ACTION_MASK!r}]"
            )
        if not isinstance(spec.action, Discrete):
            raise ConfigError(
                f"{name} is an action mask, which is for discrete actions, but its actions are "
                f"continuous, of shape {spec.action.shape}; remove it"
            )
        if leaf.shape != (spec.action.num_actions,) or leaf.dtype != jnp.bool_:
            raise ConfigError(
                f"{name} is {leaf.dtype}{list(leaf.shape)}; an action mask must be "
                f"bool[{spec.action.num_actions}], true where an action is legal"
            )
