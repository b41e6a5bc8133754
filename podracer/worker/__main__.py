"""``python -m podracer.worker --connect=HOST:PORT``.

A module of its own, because processes of environments import the main module again, and with it
JAX, unless its name is ``__main__``.
"""

import sys

from podracer.worker import main

if __name__ == "__main__":
    sys.exit(main())
