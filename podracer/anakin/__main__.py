"""``python -m podracer.anakin --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

from podracer import cli
from podracer.anakin import train

if __name__ == "__main__":
    cli.leave(cli.main(train))
