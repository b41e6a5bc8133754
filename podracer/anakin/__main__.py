"""``python -m podracer.anakin --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

import sys

from podracer import cli
from podracer.anakin import train

if __name__ == "__main__":
    sys.exit(cli.main(train))
