"""What Keras keeps for each thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kdist.keras_hooks.seeds import global_seed_generator
from kdist.keras_hooks.wrapping import running_replica


class ThreadState:
    """What Keras keeps for each thread (dtype policy, seed generator, scopes), taken along to another thread.

    Made in the thread that has the state; entered in the threads that need it.
    """

    def __init__(self) -> None:
        from keras.src.backend.common import global_state

        if running_replica() is None:
            # Made here, or every replica would make one of its own in the middle of a step.
            global_seed_generator()
        # The second is only in Keras before 3.16.
        trackers = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
        self._state = {t: dict(vars(getattr(global_state, t))) for t in trackers if hasattr(global_state, t)}

    def __enter__(self) -> None:
        from keras.src.backend.common import global_state

        for tracker, state in self._state.items():
            # Lists are stacks of scopes: two threads must not push on the same one.
            own = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
            vars(getattr(global_state, tracker)).update(own)

    def __exit__(self, *exc: object) -> None:
        return None

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Enters the state in a thread that has one of its own, which comes back at the end."""
        from keras.src.backend.common import global_state

        present = [vars(getattr(global_state, tracker)) for tracker in self._state]
        own = [dict(state) for state in present]
        try:
            with self:
                yield
        finally:
            for state, before in zip(present, own, strict=True):
                state.clear()
                state.update(before)
