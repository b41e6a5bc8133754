"""Sebulba: host (CPU) environments, actor threads, and devices split into actors and learners.

https://arxiv.org/abs/2104.06272, section "Sebulba". The path of a trajectory, step by step:

1. ``pool``: a batch of environments, which is stepped on the host and rebuilt when it fails.
2. ``actor``: an actor thread chooses the actions of a pool on its actor device, and after each
   unroll sends the trajectory to the learner devices.
3. ``pipeline``: a queue for each actor thread carries trajectories to the learner; the parameter
   server carries weights back.
4. ``learner``: takes a trajectory of every actor thread, updates the weights and publishes them.

``trainer`` puts these together, after ``setup`` has decided everything that does not need a
compiler. ``program`` has the compiled functions, ``threads`` supervises all threads, ``evaluation``
evaluates on an actor device, and ``timing`` reports what the time was spent on.
"""

from podracer.sebulba.trainer import train

__all__ = ["train"]
