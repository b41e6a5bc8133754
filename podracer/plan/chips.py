"""Published specifications of TPU chips, and the slices that the compiler can target."""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from podracer.errors import ConfigError, missing_extra, unknown
from podracer.types import Device

GIB = 2**30


class Chip(NamedTuple):
    """Published peaks of a whole chip. v2 and v3 chips have two cores, which JAX sees as devices.

    Attributes:
      flops: floating point operations per second in bfloat16, which JAX by default also
        uses to multiply float32 matrices on a TPU.
      memory: bytes of HBM.
      bandwidth: bytes per second of HBM.
      interconnect: bytes per second to its neighbours in a slice, one way, over all links.
      clock: cycles per second; None if it is not published.
      slices: shapes that can be rented; where they have three numbers, also those whose numbers
        are all multiples of 4.
      source: URL of these numbers.
      options: options of ``get_topology_desc`` whose defaults differ from JAX on this chip.
    """

    flops: float
    memory: float
    bandwidth: float
    interconnect: float
    clock: float | None
    slices: tuple[str, ...]
    source: str
    options: tuple[tuple[str, Any], ...] = ()


_FLAT = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")
_LITE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_CUBES = (*_CUBES, "8x16x16")
# Table 1, for v2 and v3: links of 4 x 496 and 4 x 656 Gbit/s.
_DOMAIN_SPECIFIC = "https://dl.acm.org/doi/10.1145/3360307"
_DOCS = "https://docs.cloud.google.com/tpu/docs/"
# The clocks of v5e and v5p are their peaks divided by the operations that their matrix units
# (128 x 128) execute in a cycle.
CHIPS = {
    "v2": Chip(46e12, 16 * GIB, 700e9, 248e9, 0.7e9, _FLAT, _DOMAIN_SPECIFIC),
    "v3": Chip(
        123e12,
        32 * GIB,
        900e9,
        328e9,
        0.94e9,
        (*_FLAT, "16x32", "32x32"),
        _DOMAIN_SPECIFIC,
    ),
    "v4": Chip(
        275e12,
        32 * GIB,
        1200e9,
        300e9,
        1.05e9,
        (*_CUBES, "16x16x16"),
        _DOCS + "v4",
        # Both cores of a chip are one device.
        (("chip_config_name", "megacore"),),
    ),
    "v5e": Chip(197e12, 16 * GIB, 819e9, 200e9, 1.5e9, _LITE, _DOCS + "v5e"),
    "v5p": Chip(
        459e12, 95 * GIB, 2765e9, 600e9, 1.75e9, (*_CUBES, "16x16x16", "16x16x24"), _DOCS + "v5p"
    ),
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 400e9, None, _LITE, _DOCS + "v6e"),
}
TOPOLOGIES = tuple(f"{name}:{shape}" for name, chip in CHIPS.items() for shape in chip.slices)


class Slice(NamedTuple):
    """One or several slices of the same topology, which this machine does not have.

    Attributes:
      topology: name of the topology, such as "v5e:4x4".
      num_slices: number of slices, connected by the data centre's network.
      chip: specifications of the chip.
      devices: JAX's descriptions of the devices of all slices.
    """

    topology: str
    num_slices: int
    chip: Chip
    devices: Sequence[Device]

    @property
    def hosts(self) -> list[list[Device]]:
        """The devices of each host."""
        hosts: dict[int, list[Device]] = {}
        for device in self.devices:
            hosts.setdefault(device.process_index, []).append(device)
        return list(hosts.values())

    @property
    def num_chips(self) -> int:
        """The number of chips in all slices."""
        chips = {(getattr(d, "slice_index", 0), *d.coords) for d in self.devices}
        return len(chips)

    @property
    def chips_per_device(self) -> float:
        """The number of chips per device: 0.5 if each core is a device, else 1."""
        return self.num_chips / len(self.devices)


def of_accelerator_type(name: str) -> list[str]:
    """The topologies of an accelerator type of Cloud TPU, such as "v5litepod-16"; none if it is no
    such type. The number in a type counts chips of v5e and v6e, and cores, two per chip, of the
    others (https://docs.cloud.google.com/tpu/docs/supported-tpu-configurations)."""
    family, _, count = name.partition("-")
    kind = {"v5litepod": "v5e"}.get(family, family)
    if kind not in CHIPS or not count.isdigit():
        return []
    chips = int(count) if kind in ("v5e", "v6e") else int(count) // 2
    shapes = CHIPS[kind].slices
    return [f"{kind}:{x}" for x in shapes if math.prod(_numbers(x)) == chips]


def _numbers(shape: str) -> list[int]:
    """The numbers of a shape; [] if it is none."""
    numbers = shape.split("x")
    return list(map(int, numbers)) if all(n.isdecimal() for n in numbers) else []


def _exists(kind: str, shape: str) -> bool:
    """Whether chips of a kind can be connected like this. The compiler ends the process for some
    shapes that can't be."""
    numbers, largest = sorted(_numbers(shape)), _numbers(CHIPS[kind].slices[-1])
    sizes = len(numbers) == len(largest)
    return sizes and all(0 < n <= most for n, most in zip(numbers, largest, strict=True))


def is_offered(topology: str) -> bool:
    """Whether a topology that the compiler knows can also be rented."""
    kind, _, shape = topology.partition(":")
    numbers = _numbers(shape)
    cube = len(numbers) == 3 and numbers == sorted(numbers) and all(n % 4 == 0 for n in numbers)
    return shape in CHIPS[kind].slices or cube


def get_slice(topology: str, num_slices: int = 1) -> Slice:
    """Describes a slice for the compiler; needs libtpu, but no TPU.

    Args:
      topology: name of the topology, such as "v5e:4x4".
      num_slices: number of slices of this topology.

    Raises:
      ConfigError: libtpu is missing, or there is no such slice.
    """
    kind, _, shape = topology.partition(":")
    if shapes := of_accelerator_type(topology):
        raise ConfigError(
            f"--topology={topology} is a type that counts chips or cores; its topology is "
            f"{' or '.join(shapes)}"
        )
    if kind not in CHIPS or not _exists(kind, shape):
        raise unknown("topology", topology, TOPOLOGIES)
    if importlib.util.find_spec("libtpu") is None:
        raise missing_extra("tpu", "planning for a TPU")
    chip = CHIPS[kind]
    options = dict(chip.options)
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        )
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ConfigError(f"{unknown('topology', topology, TOPOLOGIES)} ({error})") from error
    return Slice(topology, num_slices, chip, description.devices)
