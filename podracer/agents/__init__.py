"""Agents by name; each is a module that exports ``Config``, ``make`` and ``DEFAULTS``.

``make(spec, settings, config, devices) -> Agent`` builds an agent with its network. ``DEFAULTS``
are values of settings that all agents have, where this agent learns better with others than those
of ``podracer.config.Config``. ``Config`` holds the agent's own settings, and says what the rest of
a run has to know before the agent is built:

- ``off_policy``: whether the agent can learn from experience that was collected with older weights,
  of any age.
- ``in_environment``: whether the agent searches in the environment itself, whose state it observes.
- ``fixed``: dotted keys of the settings that can't change when a run is resumed, besides those of
  every agent (``storage.compatibility``).
- ``gradient_steps(settings) -> GradientSteps``: how an update is divided.
"""

from types import ModuleType

from podracer.agents import alphazero, d4pg, dqn, muzero, ppo, q_lambda, r2d2, vtrace

AGENTS: dict[str, ModuleType] = {
    "alphazero": alphazero,
    "d4pg": d4pg,
    "dqn": dqn,
    "muzero": muzero,
    "ppo": ppo,
    "q_lambda": q_lambda,
    "r2d2": r2d2,
    "vtrace": vtrace,
}
