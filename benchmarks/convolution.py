"""Measures gradients of convolutional torsos on a CPU, inside and outside of ``lax.scan``.

    python benchmarks/convolution.py --torso=nature --batch=32

Prints four JSON lines, each for one gradient step on random images: with the gradients of
``podracer.xla_cpu.convolution`` or with JAX's own, and inside a scan of length one or outside.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import versions
from flax import nnx

from podracer.nets.conv import Conv
from podracer.nets.resnet import ResNet
from podracer.xla_cpu import malloc

SHAPES = {
    "minatar": (10, 10, 4),
    "shallow": (84, 84, 4),
    "nature": (84, 84, 4),
    "resnet": (84, 84, 4),
}


def make_torso(name: str, *, own: bool) -> nnx.Module:
    """A torso with podracer's gradients of convolutions (``own``) or with JAX's."""
    options: dict[str, Any] = {"dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    if name == "resnet":
        torso = ResNet(SHAPES[name], **options)
    else:
        torso = Conv(name, SHAPES[name], jax.nn.relu, **options)
    for _, module in nnx.iter_graph(torso):
        if isinstance(module, nnx.Conv) and not own:
            module.conv_general_dilated = jax.lax.conv_general_dilated
    return torso


def make_step(torso: nnx.Module, *, scan: bool) -> tuple[Callable[[Any, Any], Any], Any]:
    """A gradient step ``(parameters, images [1, N, H, W, C]) -> parameters``, and parameters."""
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


def measure(torso: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Times the four variants in turn; see ``main`` for the arguments."""
    rng = np.random.default_rng(0)
    images = rng.random((1, batch, *SHAPES[torso]), np.float32)
    variants = [(own, scan) for own in (True, False) for scan in (True, False)]
    steps = {
        (own, scan): make_step(make_torso(torso, own=own), scan=scan) for own, scan in variants
    }
    times: dict[tuple[bool, bool], list[tuple[float, float]]] = {x: [] for x in variants}
    # The first round compiles, and is not counted.
    for i in range(rounds + 1):
        for variant, (step, parameters) in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(parameters, images))
            if i:
                elapsed = time.perf_counter() - wall, time.process_time() - cpu
                times[variant].append(elapsed)
    results = []
    for own, scan in variants:
        wall, cpu = zip(*times[own, scan], strict=True)
        results.append(
            {
                "torso": torso,
                "batch": batch,
                "gradients": "podracer" if own else "jax",
                "scan": scan,
                "images_per_second": round(batch / statistics.median(wall), 1),
                "images_per_cpu_second": round(batch / statistics.median(cpu), 1),
                "device": jax.devices()[0].device_kind,
                "versions": versions("jax", "jaxlib", "flax"),
            }
        )
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``argv`` excludes the program's name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torso", choices=SHAPES, default="nature", help="torso to measure")
    parser.add_argument("--batch", type=int, default=32, help="images per gradient step")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant")
    args = parser.parse_args(argv)
    malloc.keep_freed_memory()  # As in training.
    for result in measure(args.torso, args.batch, args.rounds):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
