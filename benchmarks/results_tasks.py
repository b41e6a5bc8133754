"""What is trained for docs/results.md: tasks, in sets, beside returns that others publish."""

import zlib
from typing import NamedTuple

from podracer.monitoring.figures import EVALUATION, RETURN


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
      label: the name of its curve; "" is the agent and ``name``.
      metric: the metric of its curve, the same for all tasks of a title.
    """

    title: str
    config: str
    architecture: str = "anakin"
    changes: tuple[str, ...] = ()
    seeds: int = 5
    references: tuple[Reference, ...] = ()
    peer: str = ""
    top: bool = False
    label: str = ""
    metric: str = RETURN

    @property
    def name(self) -> str:
        """The config and its changes, without separators of paths."""
        return "-".join([self.config, *self.changes]).replace("/", "_").replace(":", "_")

    def folder(self, seed: int) -> str:
        """The name of the folder of the run with this seed, of at most 255 bytes."""
        name = self.name
        if len(name) > 200:
            name = f"{name[:190]}-{zlib.crc32(name.encode()):08x}"
        return f"{name}-{seed}"

    def command(self, seed: int) -> list[str]:
        """The arguments after ``python`` of the run with this seed, without its workdir."""
        changes = [*self.changes, *([f"seed={seed}"] if seed else [])]
        config = f"--config=configs/{self.config}.py"
        return ["-m", f"podracer.{self.architecture}", config, *(f"--config.{x}" for x in changes)]


def gymnax(value: float) -> Reference:
    """The return of a trained agent that gymnax lists."""
    return Reference(value, "gymnax", "https://github.com/RobertTLange/gymnax/blob/main/README.md")


def zoo(value: float, steps: str, agent: str = "PPO") -> Reference:
    """The return of an agent of RL Baselines3 Zoo after these steps: one run each, which its page
    does not call a benchmark. Of its environments, versions may be older."""
    commit = "0088472b8cb622732bdbc4aa3d0d0abde86c67ed"
    source = f"https://github.com/DLR-RM/rl-baselines3-zoo/blob/{commit}/benchmark.md"
    return Reference(value, f"{agent}, RL Baselines3 Zoo, {steps} steps", source)


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
    references = (zoo(reference, "1 M"),)
    return Task(robot, "mujoco", "sebulba", changes, references=references, top=True)


# PPO on MinAtar for as many steps as MuZero.
SHORT = "total_steps=1_000_000"
# The projects whose runs are in docs/results_peers.jsonl, by what their tasks begin with.
PEERS = {"purejaxrl": "PureJaxRL", "cleanrl": "CleanRL", "stoix": "Stoix", "brax": "Brax"}


def as_peer(peer: str, config: str, architecture: str, *changes: str) -> Task:
    """A task with the settings of a run of another project; ``docs/coming_from_*.md``."""
    project, env = peer.split("-", 1)
    name = env.removesuffix("-v1").replace("_", " ")
    title = f"{name[0].upper()}{name[1:]} as in {PEERS[project]}"
    return Task(title, config, architecture, changes, peer=peer, label="podracer")


SETS: dict[str, list[Task]] = {
    "classic": [
        Task("CartPole", "cartpole", references=(gymnax(500),), top=True),
        Task("CartPole", "cartpole", changes=("agent=vtrace",), references=(gymnax(500),)),
        Task("CartPole", "cartpole_dqn", references=(gymnax(500),)),
        Task("Catch", "catch"),
        Task("Acrobot", "acrobot", references=(gymnax(-80), zoo(-73.5, "1 M"))),
        Task("MountainCar", "mountain_car", references=(gymnax(-118), zoo(-110, "1 M"))),
        Task("Pendulum", "pendulum", references=(gymnax(-130), zoo(-172, "100 K"))),
        Task(
            "Pendulum",
            "pendulum_d4pg",
            references=(gymnax(-130), zoo(-152, "20 K", "DDPG")),
            top=True,
        ),
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
        Task("LunarLander", "lunarlander", "sebulba", references=(zoo(242, "1 M"),), top=True),
    ],
    "atari": [
        Task("Atari Pong", "atari", "sebulba", seeds=3, references=(zoo(20.99, "10 M"),), top=True),
    ],
    "pong_replay": [
        Task(
            "Atari Pong", "pong_r2d2", "sebulba", references=(zoo(20.6, "10 M", "DQN"),), top=True
        ),
        Task(
            "Atari Pong",
            "pong_dqn",
            "sebulba",
            seeds=3,
            references=(zoo(20.6, "10 M", "DQN"),),
            top=True,
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
            references=(zoo(9656, "1 M", "TD3"),),
            top=True,
        ),
    ],
    "search": [
        Task("CartPole", "cartpole_muzero", references=(gymnax(500),), top=True),
        Task("MinAtar Breakout", "minatar", changes=(SHORT,)),
        Task("MinAtar Asterix", "minatar", changes=(SHORT, "env=gymnax:Asterix-MinAtar")),
        Task("Pendulum", "pendulum_muzero", references=(gymnax(-130), zoo(-172, "100 K"))),
        # In self-play, the return of training is the share of games that are decided.
        Task("Tic-tac-toe against random", "tic_tac_toe", top=True, metric=EVALUATION),
        Task("Connect Four against random", "connect_four", top=True, metric=EVALUATION),
    ],
    "peers": [
        as_peer(
            "purejaxrl-CartPole-v1",
            "cartpole",
            "anakin",
            "num_envs=4",
            "total_steps=500_000",
            "learning_rate=2.5e-4",
            "ppo.advantage_normalization=minibatch",
        ),
        as_peer(
            "cleanrl-CartPole-v1",
            "cartpole",
            "sebulba",
            "env=envpool:CartPole-v1",
            "num_envs=4",
            "total_steps=200_000",
            "learning_rate=2.5e-4",
            "ppo.advantage_normalization=minibatch",
            "sebulba.threads=1",
            "sebulba.lag=0",
        ),
        as_peer(
            "stoix-CartPole-v1",
            "cartpole",
            "anakin",
            "num_envs=64",
            "total_steps=491_520",
            "learning_rate=3e-4",
            "num_minibatches=16",
            "network.hidden=(256,256)",
            "network.activation=relu",
        ),
        as_peer(
            "brax-inverted_pendulum",
            "brax_ant",
            "anakin",
            "env=brax:inverted_pendulum",
            "env_kwargs.backend=positional",
            "num_envs=128",
            "unroll_length=80",
            "total_steps=368_640",
            "anneal=False",
            "epsilon=1e-8",
            "max_grad_norm=0",
            "entropy_cost=0.01",
            "num_minibatches=32",
            "ppo.clip=0.3",
            "ppo.value_clip=0",
            "ppo.advantage_normalization=minibatch",
            "normalize_rewards=False",
            "network.hidden=(32,32,32,32)",
            "network.activation=silu",
            "network.initial_log_std=-0.37",
            "evaluation.episodes=128",
            "evaluation.greedy=False",
        ),
    ],
}
