"""A trace of some updates, as XProf and TensorBoard's profile plugin show it."""

from typing import Any

import jax
from etils import epath


class Profile:
    """Traces so many updates, from the second call of a start on: the first one warms up."""

    def __init__(self, updates: int, folder: epath.Path | None):
        """``updates`` of 0 traces none; the trace goes to ``folder``, which is local."""
        self._folder = folder
        self._updates = updates
        self._calls, self._end = 0, None

    def look(self, state: Any, update: int) -> bool:
        """To be called between calls of a step.

        Args:
          state: that ``update`` updates have made.
          update: their number.

        Returns:
          Whether a trace has ended here.
        """
        self._calls += 1
        if self._end is None and self._updates and self._calls == 2:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._end = update + self._updates
        elif self._end is not None and update >= self._end:
            jax.block_until_ready(state)
            self.close()
            return True
        return False

    def close(self) -> None:
        """Ends a trace that is under way."""
        if self._end is not None:
            jax.profiler.stop_trace()
            self._updates, self._end = 0, None
