"""CartPole by DQN."""

from podracer.config import default_config


def get_config():
    config = default_config()
    config.env = "gymnax:CartPole-v1"
    config.agent = "dqn"
    config.total_steps = 500_000
    config.num_envs = 32
    config.unroll_length = 8
    config.learning_rate = 1e-3
    config.max_grad_norm = 10.0
    config.network.hidden = (128, 128)
    config.network.activation = "relu"
    config.replay.capacity = 100_000
    config.replay.begin = 5_000
    config.replay.batch = 128
    config.replay.gradient_steps = 2
    config.dqn.n_step = 3
    config.dqn.target_period = 200
    return config
