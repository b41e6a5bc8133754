"""Says what works on this machine, and what to do about the rest: ``python -m podracer.doctor``.

With ``--config=FILE --config.KEY=VALUE ...`` it also says whether a run would start with these
settings. Nothing is compiled or written. The exit code is 2 if something would prevent training.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial

import podracer
from podracer.errors import ArgumentParser, ConfigError, run_command
from podracer.training import diagnosis

PARSER = ArgumentParser(prog="python -m podracer.doctor", description=__doc__)
PARSER.add_argument("--workdir", default="runs", help="Folder that runs write to")
PARSER.add_argument("--json", action="store_true", help="Print JSON, for a bug report")
MARKS = {"ok": "ok", "note": "-", "warning": "!", "problem": "PROBLEM"}


def _print(finding: diagnosis.Finding) -> None:
    head = f"{MARKS[finding.state]:<8} {finding.name:<10} "
    below = " " * len(head)
    wrap = textwrap.TextWrapper(100, subsequent_indent=below, break_on_hyphens=False)
    advice = [f"{below}-> {finding.advice}"] if finding.advice else []
    print(*map(wrap.fill, [head + finding.text, *advice]), sep="\n", flush=True)


def _check(arguments: Sequence[str]) -> Iterator[diagnosis.Finding]:
    # It imports JAX, which may be what fails.
    from podracer.training.config_diagnosis import check_config

    return check_config(arguments, lambda name: getattr(podracer, name).trainer.prepare)


def _command(argv: Sequence[str] | None) -> None:
    args, config = PARSER.parse_known_args(argv)
    findings = []
    for finding in diagnosis.diagnose(args.workdir, partial(_check, config) if config else None):
        findings.append(finding)
        if not args.json:
            _print(finding)
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    problems = sorted({finding.name for finding in findings if finding.state == "problem"})
    if problems:
        raise ConfigError(f"problems with {', '.join(problems)}: no run would start like this")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ``argv`` excludes the program's name. Returns the exit code."""
    return run_command(lambda: _command(argv))


if __name__ == "__main__":
    sys.exit(main())
