"""A policy to call from Python: one observation in, one action out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.acting.unroll import env_keys
from podracer.envs import spaces
from podracer.errors import ConfigError
from podracer.types import (
    Agent,
    Array,
    ArrayTree,
    Carry,
    Discrete,
    Environment,
    HostEnvironment,
    Spec,
    TimeStep,
    Weights,
)


def _check_weights(agent: Agent, weights: Weights) -> None:
    """Raises ``ConfigError`` if the weights have other shapes than the agent's."""
    expected = jax.eval_shape(agent.init, jax.random.key(0))
    if jax.tree.structure(weights) != jax.tree.structure(expected):
        raise ConfigError("the weights belong to another agent or network: their structure differs")
    pairs = zip(jax.tree.leaves_with_path(weights), jax.tree.leaves(expected), strict=True)
    for (path, x), other in pairs:
        if np.shape(x) != other.shape:
            raise ConfigError(
                f"the weights{jax.tree_util.keystr(path)} have shape {np.shape(x)}, the agent's "
                f"{other.shape}; for a run with num_seeds > 1, pass one agent's: "
                "jax.tree.map(lambda x: x[i], weights)"
            )


def _describe(tree: ArrayTree) -> Any:
    """Dtypes and shapes in words, in a dictionary for a dictionary."""
    if isinstance(tree, dict):
        return {key: _describe(x) for key, x in tree.items()}
    if not hasattr(tree, "dtype"):
        return type(tree).__name__
    return f"{tree.dtype}{list(tree.shape)}"


def _is_like(x: ArrayTree, spec: ArrayTree) -> bool:
    """Whether an observation is one of this shape and dtype, or can be cast to it."""
    if isinstance(x, dict) or isinstance(spec, dict):
        return (
            isinstance(x, dict)
            and isinstance(spec, dict)
            and x.keys() == spec.keys()
            and all(_is_like(x[key], spec[key]) for key in spec)
        )
    # The state of a game is a record of arrays.
    return jax.tree.structure(x) == jax.tree.structure(spec) and all(
        a.shape == s.shape and np.can_cast(a.dtype, s.dtype, "same_kind")
        for a, s in zip(jax.tree.leaves(x), jax.tree.leaves(spec), strict=True)
    )


def _observe(env: Environment | HostEnvironment, observation: ArrayTree) -> ArrayTree:
    """An observation as agents see it; raises ``ConfigError`` if it is not the environment's."""
    spec = env.spec.observation
    try:
        seen = env.observe(observation)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"an observation {_describe(observation)} is not one of this environment, from which "
            f"the agent gets {_describe(spec)}: {error}"
        ) from error
    if not _is_like(seen, spec):
        raise ConfigError(
            f"an observation {_describe(observation)} becomes {_describe(seen)} for the agent, "
            f"which expects {_describe(spec)}"
        )
    return jax.tree.map(lambda x, s: x.astype(s.dtype), seen, spec)


class Policy:
    """An agent that acts in one environment, as a function from observation to action.

    Observations and actions have the form in which the environment of gymnax, Gymnasium or envpool
    itself returns and takes them, without a batch axis. The policy keeps the agent's carry from one
    call to the next, so ``reset`` must be called where an episode begins::

        observation, _ = env.reset()
        policy.reset()
        while not done:
            observation, _, terminated, truncated, _ = env.step(policy(observation))
            done = terminated or truncated

    It computes actions on this process' first device. One policy plays one episode at a time, so
    several threads need one each.
    """

    def __init__(
        self,
        agent: Agent,
        weights: Weights,
        env: Environment | HostEnvironment,
        *,
        greedy: bool = True,
        seed: int = 0,
    ):
        """Compiles nothing; the first call does.

        Args:
          agent: the agent that acts.
          weights: the agent's weights; for a run with num_seeds > 1, those of one of its agents.
          env: the environment, which converts observations and actions but is not stepped.
          greedy: act without exploration; if false, as in training, with the exploration of the
            first environment.
          seed: seed of sampled actions.

        Raises:
          ConfigError: the weights are not the agent's.
        """
        _check_weights(agent, weights)
        self._spec: Spec = env.spec
        device = jax.local_devices()[0]
        self._weights = jax.device_put(jax.device_get(weights), device)
        self._key = jax.device_put(jax.random.key(seed), device)
        self._initial = jax.device_put(agent.carry(jnp.zeros(1, jnp.int32)), device)
        self._count = 0

        def act(
            weights: Weights,
            carry: Carry,
            key: Array,
            count: Array,
            first: Array,
            reward: Array,
            observation: Any,
        ) -> tuple[Carry, Array]:
            seen = jax.tree.map(lambda x: x[None], _observe(env, observation))
            timestep = TimeStep(seen, reward[None], jnp.ones(1), first[None])
            env_ids = jnp.zeros(1, jnp.int32)
            keys = env_keys(jax.random.fold_in(key, count), env_ids, 1)[0]
            carry, action, _ = agent.act(weights, carry, timestep, keys, greedy=greedy)
            return carry, spaces.to_environment(action, env.spec.action)[0]

        self._act = jax.jit(act)
        self.reset()

    def reset(self) -> None:
        """Begins a new episode: resets the carry. Actions are sampled with new random numbers."""
        self._carry, self._first = self._initial, True

    def __call__(self, observation: Any, reward: float = 0.0) -> Any:
        """Chooses the next action.

        Args:
          observation: a number, an array or a dictionary of them, as the environment itself
            returns it.
          reward: the reward that came with the observation. Only agents that observe rewards, such
            as R2D2, need it.

        Returns:
          An ``int`` for a Discrete action space, a float32 numpy array of the space's shape for a
          Box.

        Raises:
          ConfigError: the observation has another shape or kind than the environment's.
        """
        # Lists of numbers are arrays, too.
        observation = jax.tree.map(
            np.asarray, observation, is_leaf=lambda x: type(x) in (list, tuple)
        )
        count, first = np.uint32(self._count % 2**32), np.bool_(self._first)
        inputs = (count, first, np.float32(reward), observation)
        self._carry, action = self._act(self._weights, self._carry, self._key, *inputs)
        self._first = False
        self._count += 1
        if isinstance(self._spec.action, Discrete):
            return int(action)
        return np.asarray(action)
