"""Environments whose observations hold their own state, for agents that search in it."""

from typing import Any

import jax

from podracer.types import MODEL_STATE, Array, ArrayTree, Environment, Simulator, TimeStep


def _own(env: Environment) -> Simulator:
    """The environment's step with the same random numbers each time: a search in an environment
    with chance believes that it knows what chance brings."""
    return Simulator(lambda state: state, lambda state, action: env.step(_key(), state, action))


def _key() -> Array:
    return jax.random.key(0)


def _visible(observation: ArrayTree) -> dict[str, Any]:
    return observation if isinstance(observation, dict) else {"observation": observation}


def show_state(env: Environment) -> Environment:
    """The same environment, with its state in observations, and with ``Spec.model``.

    Observations that are no dictionary become one, with the key "observation".
    """
    simulator = env.simulator or _own(env)

    def observe(state: ArrayTree) -> dict[str, Any]:
        seen = _visible(env.observe(state))
        # What the suite calls an observation is the state itself only where a simulator says so.
        return {**seen, MODEL_STATE: state} if env.simulator else seen

    def show(result: tuple[ArrayTree, TimeStep]) -> tuple[ArrayTree, TimeStep]:
        state, timestep = result
        observation = {**_visible(timestep.observation), MODEL_STATE: simulator.state(state)}
        return state, timestep.replace(observation=observation)

    def model(state: ArrayTree, action: Array) -> tuple[ArrayTree, TimeStep]:
        state, timestep = simulator.step(state, action)
        return state, timestep.replace(observation=_visible(timestep.observation))

    def reset(key: Array) -> tuple[ArrayTree, TimeStep]:
        return show(env.reset(key))

    _, first = jax.eval_shape(reset, jax.random.key(0))
    return env._replace(
        spec=env.spec._replace(observation=first.observation, model=model),
        reset=reset,
        step=lambda key, state, action: show(env.step(key, state, action)),
        observe=observe,
        evaluation=env.evaluation and show_state(env.evaluation),
    )
