"""An item of a checkpoint, in JSON, some of whose values the devices may still be computing."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath


class DeferredJsonHandler(ocp.JsonCheckpointHandler):
    """Orbax's handler of JSON, which here waits for arrays in its background thread."""

    async def _save_fn(self, x: Mapping[str, Any], directory: epath.Path) -> None:
        arrays = {k: v for k, v in x.items() if isinstance(v, jax.Array)}
        numbers = {k: v.tolist() for k, v in jax.device_get(arrays).items()}
        await super()._save_fn({**x, **numbers}, directory)


# Orbax finds the handler of an item by the exact type of its arguments.
@ocp.args.register_with_handler(DeferredJsonHandler, for_save=True)
@dataclasses.dataclass
class DeferredJsonSave(ocp.args.JsonSave):
    """What to save: a dictionary of values that JSON has, and of arrays of JAX."""


@ocp.args.register_with_handler(DeferredJsonHandler, for_restore=True)
@dataclasses.dataclass
class DeferredJsonRestore(ocp.args.JsonRestore):
    """Restores the dictionary, with numbers in place of arrays."""
