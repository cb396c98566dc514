"""A parameter of a sharded model in its two forms: the full tensor, and the piece on this rank."""

from __future__ import annotations

from typing import Any

import torch

from ..private import own_parameters


class Slot:
    """A parameter of a sharded model: its names, its modules, and this rank's piece of it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape = tensor, tensor.shape  # the original parameter, until it is cut
        self.names: list[str] = []
        # modules that have the parameter, and its name in each
        self.owners: list[tuple[Any, str]] = []
        self.units: set[str] = set()
        self.numel = int(self.shape.numel())  # of the whole parameter
        self.start = 0  # its first element in the flat
        self.computes: Any = tensor.dtype  # the dtype in which it is gathered
        # a one-dimensional Parameter that the optimizer trains; it may be empty
        self.piece: Any = None
        self.whole: Any = None  # a Parameter without memory unless its unit is gathered
        self.view: Any = None  # this rank's piece of the gradient
        self.has_fired = False  # True if a gradient was computed since the last reduction
        self.kept = -1  # the version of the piece's gradient while gradients wait for a reduction
        # a reduction completed in this backward pass; the piece had a gradient before
        self.received = self.before = False

    def is_kept(self) -> bool:
        """Return whether the gradient that was kept from the last pass still exists unchanged."""
        gradient = self.piece.grad
        return gradient is not None and gradient._version == self.kept

    @property
    def is_in_rnn(self) -> bool:
        """Whether the parameter belongs to an RNN layer."""
        # such a layer also lists its parameters
        return any(isinstance(module, torch.nn.RNNBase) for module, _ in self.owners)

    def find_places(self) -> list[tuple[dict[str, Any], str]]:
        """Return the dicts of modules that store the parameter, each with the parameter's key.

        RNN layers are left out, because `point_to` handles them.
        """
        return [
            (own_parameters(module), name)
            for module, name in self.owners
            if not isinstance(module, torch.nn.RNNBase)
        ]

    def point_to(self, parameter: Any) -> None:
        """Make all modules that own this parameter use `parameter` instead."""
        for module, name in self.owners:
            if isinstance(module, torch.nn.RNNBase):
                setattr(module, name, parameter)  # an RNN keeps a list of its parameters
            else:
                own_parameters(module)[name] = parameter


def byte_count(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
