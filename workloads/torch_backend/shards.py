"""Shard the model that a probe trains, with its optimizer, over ranks with unequal memory."""

from __future__ import annotations

from typing import Any

import torch
import wrapt

from evener.torch.packed import is_packed, pack_weights
from evener.torch.shards.make import check_buffers, cut_model, move
from evener.torch.shards.place import ShardRank
from evener.torch.shards.sender import bound_received
from evener.torch.shards.unit import choose_units
from evener.torch.shards.whole import estimate_gathered_bytes
from evener.torch.step.wrapped import hook_forward

from ..protocol import WorkerSetup

# GPU memory of a process outside of PyTorch's allocator, measured on an H200: CUDA's context with
# its libraries, and NCCL's buffers
CONTEXT_BYTES = 600 << 20
NCCL_BYTES = 900 << 20


def leave_trainers_on_host() -> None:
    """Keep transformers' Trainer from moving its model to the GPU.

    A sharded model is moved part by part, because it may not fit on one GPU.
    """
    wrapt.register_post_import_hook(_leave_on_host, "transformers.trainer")


def _leave_on_host(module: Any) -> None:
    module.Trainer._move_model_to_device = lambda *_: None


class RecipeShards:
    """Shards a recipe's model and optimizer over the ranks, using the fractions in `setup.state`.

    It also runs a first optimizer step, to measure the memory of weights, gradients and optimizer
    state.
    """

    def __init__(self, recipe: Any, setup: WorkerSetup, device: torch.device) -> None:
        module, alone = recipe.module, setup.world == 1
        parts = setup.state if len(setup.state) > 1 else (*setup.state, 1 - setup.state[0])
        pack_weights(module, device)
        check_buffers(module)
        units, replaced = choose_units(module, None), list(module.parameters())
        autocast_dtype = recipe.autocast_dtype
        received = bound_received(len(parts))
        self._gathered = estimate_gathered_bytes(module, units, None, autocast_dtype, received)
        capped = any(limit is not None for limit in setup.memory_limit_bytes)
        on_whole_gpu = device.type == "cuda" and not capped
        self._other_bytes = CONTEXT_BYTES + NCCL_BYTES if on_whole_gpu else 0
        # there are two packed parameters per byte
        sizes = [(2 * each.nbytes if is_packed(each) else each.numel()) for each in replaced]
        self._parameters = sum(sizes)
        self._trained = sum(each.numel() for each in replaced if each.requires_grad)
        own = ShardRank(setup.rank, parts, device, alone)
        self.sharded = cut_model(module, units, own, autocast_dtype=autocast_dtype)
        # with gradient accumulation, gradients coexist with the peak of activations
        self.sharded.frees_gradients = not recipe.accumulates
        move(recipe.optimizer, replaced, module)
        self._state, self._step = self._measure_state(recipe.optimizer, device)
        hook_forward(module, device, lambda *_: None)
        self._computes = True

    def compute_nothing(self) -> None:
        """Make this rank only hold its shard, without computing any rows.

        It still takes part in the collectives of the other ranks.
        """
        if self._computes:
            self._computes = False
            self.sharded.compute_nothing()

    def describe(self) -> str:
        """Return seven numbers about the whole model's memory, separated by spaces.

        - bytes of weights, gradients and optimizer state
        - bytes of weights that are gathered at the same time
        - bytes that an optimizer step needs in addition
        - number of parameters
        - number of trained parameters
        - bytes of gradients that are freed before the forward pass
        - bytes that a process uses outside PyTorch's allocator
        """
        sizes = (self._state, self._gathered, self._step, self._parameters, self._trained)
        return " ".join(map(str, (*sizes, self._gradients, self._other_bytes)))

    def _measure_state(self, optimizer: Any, device: torch.device) -> tuple[int, int]:
        """Return the bytes of the whole model's state, and the bytes that an optimizer step adds.

        They are extrapolated from a first step with zero gradients on this rank's shard.
        """
        for parameter in self.sharded.parameters:
            parameter.grad = torch.zeros_like(parameter)
        before, noted = _count_from_here(device), self.sharded.ledger.now.total()
        optimizer.step()
        ledger = self.sharded.ledger
        held, kept = ledger.now["state"], ledger.now.total() - noted
        taken = (
            max(0, torch.cuda.max_memory_allocated(device) - before - kept)
            if device.type == "cuda"
            else 0
        )
        optimizer.zero_grad(set_to_none=True)
        units = (self.sharded.root, *self.sharded.units)
        flats = [(flat, flat.shard.element_size()) for unit in units for flat in unit.flats]
        whole = sum(flat.elements * size for flat, size in flats)
        trained = sum(flat.elements * size for flat, size in flats if flat.trainable)
        self._gradients = trained if self.sharded.frees_gradients else 0
        own = sum(flat.shard.numel() * size for flat, size in flats if flat.trainable)
        return round(whole + trained + held * trained / max(1, own)), round(
            taken * trained / max(1, own)
        )


def _count_from_here(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))
