"""``python -m podracer.sebulba --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

import multiprocessing
import os
import sys
import threading

from podracer import cli
from podracer.sebulba import train

if __name__ == "__main__":
    code = cli.main(train)
    # A thread that hangs can't be ended: Python would wait for it, or crash in its C++.
    if any(thread is not threading.main_thread() for thread in threading.enumerate()):
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
