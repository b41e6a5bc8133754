"""Checks that run in a process of their own: ``python -m podracer.training.probes NAME``.

JAX and envpool are C++ libraries, which may hang or end their process. Each probe prints what it
finds as JSON objects, one on a line.
"""

import json
import sys
from typing import Any


def _found(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def devices() -> None:
    """What the machine has, and the devices that JAX finds."""
    import jax
    from jax._src import hardware_utils

    from podracer.config.sizes import cpu_cores
    from podracer.distributed import mesh
    from podracer.training.memory import machine_memory

    _found(
        cores=cpu_cores(),
        memory=machine_memory(),
        nvidia=hardware_utils.has_visible_nvidia_gpu(),
        tpu=hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0,
    )
    found = mesh.initialize_devices(1, required=False)
    _found(
        platform=found[0].platform,
        devices=[f"{device} ({device.device_kind})" for device in found],
        cache=jax.config.values["jax_compilation_cache_dir"],
    )
    # A device that is listed may still be unusable, as with the wrong driver.
    _found(sum=int(jax.numpy.ones(3).sum()))


def envpool() -> None:
    """Whether envpool makes environments, and steps them."""
    import numpy as np

    from podracer import envs

    pool = envs.make_host_environment("envpool:CartPole-v1", {}, {}).make_pool([0, 1], 1)
    pool.reset()
    step = pool.step(np.zeros(2, np.int32))
    pool.close()
    _found(reward=step.raw_reward.tolist())


if __name__ == "__main__":
    {"devices": devices, "envpool": envpool}[sys.argv[1]]()
