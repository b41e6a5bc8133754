"""How the shipped configs play Atari games, in options of envpool (see configs/atari.py)."""

PROTOCOL = {
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "reward_clip": True,
    "noop_max": 30,
    "use_fire_reset": True,
    "max_episode_steps": 27_000,
}
