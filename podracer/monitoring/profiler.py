"""A trace of some updates, which XProf and TensorBoard's profile plugin show."""

from typing import Any

import jax
from etils import epath


class Profile:
    """Traces a number of updates, from the second call on; the first call is a warm-up."""

    def __init__(self, updates: int, folder: epath.Path | None):
        """Traces nothing if ``updates`` is 0. ``folder`` is the local folder for the trace."""
        self._folder = folder
        self._updates = updates
        self._calls, self._end = 0, None

    def advance(self, state: Any, update: int) -> bool:
        """Starts or ends the trace if it is due; must be called before each call of a step.

        Args:
          state: the state after ``update`` updates.
          update: the number of updates done.

        Returns:
          Whether the trace has ended here.
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
        """Ends a trace that has been started."""
        if self._end is not None:
            jax.profiler.stop_trace()
            self._updates, self._end = 0, None
