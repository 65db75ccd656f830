"""Keras's per-thread state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kdist.keras_hooks.seeds import global_seed_generator
from kdist.keras_hooks.wrapping import running_replica


class ThreadState:
    """Keras's state of one thread (dtype policy, seed generator, scopes), for use in other threads.

    Create it in the thread that has the state, and enter it in the threads that need it.
    """

    def __init__(self) -> None:
        from keras.src.backend.common import global_state

        if running_replica() is None:
            # Otherwise every replica would create its own generator during a step.
            global_seed_generator()
        # Only Keras before 3.16 has the second tracker.
        trackers = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
        self._state = {t: dict(vars(getattr(global_state, t))) for t in trackers if hasattr(global_state, t)}

    def __enter__(self) -> None:
        from keras.src.backend.common import global_state

        for tracker, state in self._state.items():
            # Lists are stacks of scopes, so two threads must not push onto the same list.
            own = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
            vars(getattr(global_state, tracker)).update(own)

    def __exit__(self, *exc: object) -> None:
        return None

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Enters the state in a thread, and restores the previous state of the thread at the end."""
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
