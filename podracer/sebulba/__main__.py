"""``python -m podracer.sebulba --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

from podracer import cli
from podracer.sebulba import train

if __name__ == "__main__":
    cli.leave(cli.main(train))
