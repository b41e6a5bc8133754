"""Steps environments for a learner: ``python -m podracer.worker --connect=HOST:PORT``.

The learner says which environments, and chooses their actions. The worker may be started before it,
and reconnects until it hears that the run is over.
"""

import sys
from collections.abc import Sequence

import jax
from absl import flags

from podracer.config.sizes import cpu_cores
from podracer.errors import ConfigError, run_command
from podracer.remote import access
from podracer.remote.worker import WorkerOptions, end_on_sigterm, end_with_stdin, print_line, work
from podracer.training import command_line

FLAGS: dict[str, command_line.Flag] = {
    "connect": (flags.DEFINE_list, None, "HOST:PORT of the learner's machine, or of several"),
    "num_envs": (flags.DEFINE_integer, 64, "Number of environments"),
    "num_pools": (flags.DEFINE_integer, cpu_cores(), "Pools that step independently"),
    "allow_env": (
        flags.DEFINE_string,
        None,
        "Environment id that may import a module or use files",
    ),
    "token_file": (flags.DEFINE_string, "", f"File with the token; default: ${access.TOKEN}"),
    "tls_ca": (flags.DEFINE_string, "", "Certificate that the server's comes from; uses TLS"),
    "tls_cert": (flags.DEFINE_string, "", "The worker's certificate, if the server asks for one"),
    "tls_key": (flags.DEFINE_string, "", "The key of this certificate"),
    "insecure": (flags.DEFINE_bool, False, "Send the token to other machines without TLS"),
    "compression": (flags.DEFINE_bool, False, "Compress what is sent, for slow networks"),
    "local": (flags.DEFINE_bool, False, "End when standard input is closed, with who started it"),
    "quiet": (flags.DEFINE_bool, False, "Print nothing but errors"),
}


def _command(argv: Sequence[str]) -> None:
    given = command_line.parse_flags("worker --connect=HOST:PORT", FLAGS, argv)
    if not given["connect"]:
        raise ConfigError("--connect is missing; specify HOST:PORT of the learner's machine")
    quiet = given.pop("quiet")
    if given.pop("local"):
        end_with_stdin()
    end_on_sigterm()
    # A worker needs no accelerator, and must not take one from another process.
    jax.config.update("jax_platforms", "cpu")
    log = (lambda _: None) if quiet else print_line
    work(WorkerOptions(**given, num_threads=cpu_cores()), log)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` includes the program's name. Returns the exit code."""
    return run_command(lambda: _command(sys.argv if argv is None else argv))
