"""What agents share that learn from one unroll at a time: its preparation, and batch items."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents import normalization, returns
from podracer.agents.settings import Settings
from podracer.types import ArrayTree, GradientSteps, Reduce, TrainState, Trajectory


def make_preprocess(
    settings: Settings, all_mean: Reduce
) -> Callable[[TrainState, Trajectory], tuple[Trajectory, dict[str, Any]]]:
    """``(train_state, trajectory) -> (normalised trajectory, statistics to act with next)``.

    Observations are normalised by the statistics of the weights: without lag, these are the
    statistics that the actor used, so that importance ratios are 1 at the first gradient step.
    Rewards are normalised by statistics that include this batch.

    Args:
      settings: the settings of every agent.
      all_mean: the mean of a tree over devices.
    """
    update_stats = normalization.make_update_stats(settings, all_mean)

    def preprocess(
        train_state: TrainState, trajectory: Trajectory
    ) -> tuple[Trajectory, dict[str, Any]]:
        stats, timestep = update_stats(train_state, trajectory), trajectory.timestep
        before = train_state.weights.stats
        timestep = timestep.replace(
            observation=normalization.normalize_observation(before, timestep.observation),
            reward=normalization.normalize_reward(stats, timestep.reward),
        )
        if settings.rollout.whole_episodes:
            timestep = returns.only_whole_episodes(timestep)
        return trajectory.replace(timestep=timestep), stats

    return preprocess


def time_major(tree: ArrayTree) -> ArrayTree:
    """Swaps the first two axes of every array: ``[T, B]`` <-> ``[B, T]``."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)


def items(tree: ArrayTree, length: int) -> ArrayTree:
    """``[T, B, ...]`` -> ``[B * T / length, length, ...]``, environments outermost.

    An item is what the learner shuffles: the whole unroll of an environment (``length`` = T) for
    recurrent networks, else one transition (``length`` = 1). In both cases ``time_major`` turns a
    batch of items back into ``[T, B, ...]``, as losses read it.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, length, *x.shape[2:]), tree)


def gradient_steps(settings: Settings, *, whole_unrolls: bool) -> GradientSteps:
    """How an unroll is divided into gradient steps.

    Args:
      settings: the settings of every agent.
      whole_unrolls: whether an item is the unroll of an environment; otherwise it is a transition.
    """
    epochs, minibatches = settings.rollout.num_epochs, settings.rollout.num_minibatches
    transitions = settings.num_unrolls * settings.unroll_length
    items = settings.num_unrolls if whole_unrolls else transitions
    return GradientSteps(
        epochs * minibatches,
        # Too many minibatches are rejected by the source, which knows the items of a device.
        max(1, transitions // minibatches),
        # Whole minibatches on every device.
        items // minibatches if items % minibatches == 0 else 1,
        f"{epochs} epochs of {minibatches} minibatches",
    )
