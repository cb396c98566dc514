"""The positions of a training in all its loaders, for a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError
from .loader import Loader

_LOADERS = "loaders"


class LoaderStates:
    """The loaders of a training that are in use, in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Loader]] = []
        self._waiting: list[dict[str, Any]] = []  # states of loaders that aren't made yet

    def add(self, loader: Loader) -> Loader:
        """Remember a loader; it goes on where the loader of its place was, if a state was loaded before it was made."""
        self._made.append(weakref.ref(loader))
        if self._waiting:
            loader.load_state_dict(self._waiting.pop(0))
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The states of all, the same on every rank, fit for JSON."""
        return {_LOADERS: [loader.state_dict() for loader in self._list()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make each loader go on where it was, also those that are made later; RequestError for another's state."""
        if not isinstance(state.get(_LOADERS), list):
            raise RequestError(f"The state of the split has no {_LOADERS!r}.", "Give what its state_dict() returned.")
        states, loaders = state[_LOADERS], self._list()
        for loader, own in zip(loaders, states, strict=False):
            loader.load_state_dict(own)
        self._waiting = list(states[len(loaders) :])

    def _list(self) -> list[Loader]:
        self._made = [each for each in self._made if each() is not None]
        return [loader for each in self._made if (loader := each()) is not None]
