"""What the gradients of a torso's convolutions cost in a scan and outside, as JSON lines.

    python benchmarks/convolution.py --torso=nature --batch=32

One gradient step on random images, by ``podracer.nets.convolve`` and by JAX's own gradients: each
as the body of a ``lax.scan`` of length one, and without it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import versions
from flax import nnx

from podracer.nets.conv import Conv
from podracer.nets.resnet import ResNet

SHAPES = {
    "minatar": (10, 10, 4),
    "shallow": (84, 84, 4),
    "nature": (84, 84, 4),
    "resnet": (84, 84, 4),
}


def make_torso(name: str, *, own: bool) -> nnx.Module:
    """A torso with podracer's own gradients of convolutions, or JAX's."""
    kinds: dict[str, Any] = {"dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    if name == "resnet":
        torso = ResNet(SHAPES[name], **kinds)
    else:
        torso = Conv(name, SHAPES[name], jax.nn.relu, **kinds)
    for _, module in nnx.iter_graph(torso):
        if isinstance(module, nnx.Conv) and not own:
            module.conv_general_dilated = jax.lax.conv_general_dilated
    return torso


def make_step(torso: nnx.Module, *, scan: bool) -> tuple[Callable[[Any, Any], Any], Any]:
    """``(parameters, images [1, N, H, W, C]) -> parameters``, and the first parameters."""
    graph, parameters = nnx.split(torso)

    def loss(parameters: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters)(images).mean()

    def step(parameters: Any, images: jax.Array) -> tuple[Any, None]:
        gradients = jax.grad(loss)(parameters, images)
        return jax.tree.map(lambda x, g: x - 1e-4 * g, parameters, gradients), None

    def update(parameters: Any, images: jax.Array) -> Any:
        if scan:
            return jax.lax.scan(step, parameters, images)[0]
        return step(parameters, images[0])[0]

    return jax.jit(update), parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torso", choices=SHAPES, default="nature")
    parser.add_argument("--batch", type=int, default=32, help="images of a gradient step")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each, in turn")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    images = rng.random((1, args.batch, *SHAPES[args.torso]), np.float32)
    kinds = [(own, scan) for own in (True, False) for scan in (True, False)]
    steps = {
        (own, scan): make_step(make_torso(args.torso, own=own), scan=scan) for own, scan in kinds
    }
    taken: dict[tuple[bool, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    # The first round compiles.
    for number in range(args.rounds + 1):
        for kind, (step, parameters) in steps.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(parameters, images))
            if number:
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                taken[kind].append(spent)
    for own, scan in kinds:
        wall, cpu = zip(*taken[own, scan], strict=True)
        print(
            json.dumps(
                {
                    "torso": args.torso,
                    "batch": args.batch,
                    "gradients": "podracer" if own else "jax",
                    "scan": scan,
                    "images_per_second": round(args.batch / statistics.median(wall), 1),
                    "images_per_cpu_second": round(args.batch / statistics.median(cpu), 1),
                    "device": jax.devices()[0].device_kind,
                    "versions": versions("jax", "jaxlib", "flax"),
                }
            )
        )


if __name__ == "__main__":
    main()
