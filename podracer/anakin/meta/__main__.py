"""``python -m podracer.anakin.meta --config=FILE [--workdir=FOLDER] [--config.KEY=VALUE ...]``."""

from podracer.anakin.meta import train
from podracer.training import command_line

if __name__ == "__main__":
    command_line.leave(command_line.main(train))
