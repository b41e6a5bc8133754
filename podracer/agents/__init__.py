"""Agents by name: ``make(spec, network, common settings, own settings, all_mean) -> Agent``."""

from collections.abc import Callable

from podracer.agents import ppo, vtrace
from podracer.types import Agent

AGENTS: dict[str, Callable[..., Agent]] = {"ppo": ppo.make, "vtrace": vtrace.make}
