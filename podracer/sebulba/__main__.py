"""``python -m podracer.sebulba --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

import os
import sys

if __name__ == "__main__":
    # Imported here, as processes that step environments import this file again.
    from podracer import cli
    from podracer.sebulba import train

    code = cli.main(train)
    if code == cli.ACTOR:
        # A thread that hangs can't be ended, and Python would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
