"""What stands in the way of a run with given settings; nothing is compiled."""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podracer import config as config_lib
from podracer import envs
from podracer.errors import ConfigError, TransientError
from podracer.monitoring import writers
from podracer.training import command_line, memory
from podracer.training.diagnosis import Finding


def check_config(
    arguments: Sequence[str], prepare: Callable[[str], Callable[[Any], Any]]
) -> Iterator[Finding]:
    """Whether a run would start with these settings.

    Args:
      arguments: ``--config=FILE`` and the changes of its values.
      prepare: the function that sets up a run, by the name of its architecture.
    """
    try:
        given, path, _ = command_line.parse_config("doctor", {}, ["doctor", *arguments])
        config = config_lib.parse(given)
        writers.check(config.logging)
        setup = prepare(envs.architecture(config.env))(config)
        memory.check(setup.memory, config)
    except (ConfigError, TransientError) as error:
        yield Finding("problem", "config", str(error), error.__notes__[0])
        return
    except Exception as error:
        # Of the user's own file, environment or network.
        advice = "start the run: its traceback names the line"
        yield Finding("problem", "config", f"{type(error).__name__}: {error}", advice)
        return
    updates = f"{setup.sizes.num_updates:,} updates, {setup.sizes.total_steps:,} steps"
    yield Finding("ok", "config", f"{path}: {config.agent} in {config.env}, {updates}")
    if config.remote.num_envs:
        yield from check_listening(config.remote.listen)


def check_listening(address: str) -> Iterator[Finding]:
    """Whether workers on other machines could connect."""
    if not address:
        return
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        text = f"remote.listen={address} can't be listened at: {error.strerror or error}"
        yield Finding("problem", "remote", text, "choose another port, or this machine's address")
    else:
        yield Finding("ok", "remote", f"{address} is free; a firewall may still close it to others")
