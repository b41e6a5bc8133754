"""What is trained for docs/results.md: tasks, in sets, beside returns that others publish."""

from typing import NamedTuple


class Reference(NamedTuple):
    """A return that others publish, whose it is, and the page that says so."""

    value: float
    name: str
    source: str


class Task(NamedTuple):
    """A config that is trained with several seeds: one row of docs/results.md.

    Attributes:
      title: the environment, as people call it.
      config: name of a config in ``configs/``.
      architecture: "anakin" or "sebulba".
      changes: further settings of its command, such as "agent=vtrace".
      seeds: number of seeds, from 0.
      references: returns to compare with.
      peer: the task of the runs of another program to compare with, in docs/results_peers.jsonl.
      top: whether README shows the row.
    """

    title: str
    config: str
    architecture: str = "anakin"
    changes: tuple[str, ...] = ()
    seeds: int = 5
    references: tuple[Reference, ...] = ()
    peer: str = ""
    top: bool = False

    @property
    def name(self) -> str:
        """The config and its changes, in a form that may name a folder."""
        return "-".join([self.config, *self.changes]).replace("/", "_").replace(":", "_")

    def command(self, seed: int) -> list[str]:
        """The arguments after ``python`` of the run with this seed, without its workdir."""
        changes = [*self.changes, *([f"seed={seed}"] if seed else [])]
        config = f"--config=configs/{self.config}.py"
        return ["-m", f"podracer.{self.architecture}", config, *(f"--config.{x}" for x in changes)]


def gymnax(value: float) -> Reference:
    """The return of a trained agent that gymnax lists."""
    return Reference(value, "gymnax", "https://github.com/RobertTLange/gymnax")


def zoo(value: float, agent: str = "PPO") -> Reference:
    """The return of an agent of RL Baselines3 Zoo: one run each."""
    source = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md"
    return Reference(value, f"{agent}, RL Baselines3 Zoo", source)


MINATAR = {
    "Breakout": gymnax(28),
    "Asterix": gymnax(15),
    "Freeway": gymnax(58),
    "SpaceInvaders": gymnax(131),
}


def minatar(config: str, *games: str, changes: tuple[str, ...] = ()) -> list[Task]:
    """Some of the games by a config whose own game is Breakout."""
    return [
        Task(
            f"MinAtar {game}",
            config,
            changes=(*changes, *(() if game == "Breakout" else (f"env=gymnax:{game}-MinAtar",))),
            references=(MINATAR[game],),
            peer=f"purejaxrl-{game}-MinAtar" if config == "minatar" else "",
            top=not changes,
        )
        for game in games
    ]


def mujoco(robot: str, reference: float) -> Task:
    """A robot by the config whose own robot is HalfCheetah."""
    changes = () if robot == "HalfCheetah" else (f"env=envpool:{robot}-v4",)
    references = (zoo(reference),)
    return Task(robot, "mujoco", "sebulba", changes, references=references, top=True)


SETS: dict[str, list[Task]] = {
    "classic": [
        Task("CartPole", "cartpole", references=(gymnax(500),), top=True),
        Task("CartPole", "cartpole", changes=("agent=vtrace",), references=(gymnax(500),)),
        Task("CartPole", "cartpole_dqn", references=(gymnax(500),)),
        Task("Acrobot", "acrobot", references=(gymnax(-80), zoo(-73.5))),
        Task("MountainCar", "mountain_car", references=(gymnax(-118), zoo(-110))),
        Task("Pendulum", "pendulum", references=(gymnax(-130), zoo(-172))),
        Task("Pendulum", "pendulum_d4pg", references=(gymnax(-130), zoo(-152, "DDPG")), top=True),
    ],
    "memory": [
        Task("MemoryChain of 100 steps", "memory_chain"),
        Task("MemoryChain of 100 steps", "memory_chain_r2d2", top=True),
        Task("CartPole without velocities", "cartpole_gru"),
        Task("CartPole without velocities", "cartpole_r2d2"),
    ],
    "minatar": [
        *minatar("minatar", *MINATAR),
        *minatar("minatar", "Breakout", "Asterix", changes=("agent=vtrace",)),
    ],
    "minatar_dqn": minatar("minatar_dqn", *MINATAR),
    "box2d": [
        Task("LunarLander", "lunarlander", "sebulba", references=(zoo(242),), top=True),
    ],
    "atari": [
        Task("Atari Pong", "atari", "sebulba", seeds=3, references=(zoo(20.99),), top=True),
    ],
    "pong_replay": [
        Task(
            "Atari Pong", "pong_r2d2", "sebulba", seeds=3, references=(zoo(20.6, "DQN"),), top=True
        ),
        Task(
            "Atari Pong", "pong_dqn", "sebulba", seeds=3, references=(zoo(20.6, "DQN"),), top=True
        ),
    ],
    "procgen": [
        Task("Procgen CoinRun, unseen levels", "coinrun", "sebulba", seeds=3, top=True),
    ],
    "football": [
        Task("Football, empty goal close", "football", "sebulba", seeds=3, top=True),
    ],
    "mujoco": [
        mujoco("HalfCheetah", 5819),
        mujoco("Hopper", 2410),
        mujoco("Walker2d", 3479),
        mujoco("Ant", 1327),
    ],
    "d4pg": [
        Task("Pendulum from images", "pendulum_pixels_d4pg", "sebulba", top=True),
        Task(
            "HalfCheetah",
            "halfcheetah_d4pg",
            "sebulba",
            seeds=3,
            references=(zoo(9656, "TD3"),),
            top=True,
        ),
    ],
    "search": [
        Task("CartPole", "cartpole_muzero", references=(gymnax(500),), top=True),
        Task("Tic-tac-toe against random", "tic_tac_toe", top=True),
        Task("Connect Four against random", "connect_four", top=True),
    ],
}
