"""Sharded models learn what one process learns, up to float64 rounding.

What can't be sharded is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evener.torch import Split
from evener.torch.shards.checkpoint import INDEX
from evener.torch.shards.unit import choose_units
from tests.support import torch_shard_programs as programs
from tests.support import torch_shard_refusals as refusals
from tests.support.torch_ranks import example_plan
from tests.support.torch_shard_ranks import HALF, LATE, RATE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

SMALL = ("adamw, clipped", "passes, counted, accumulated", "checkpointed", "adapters")
OF_THREE = (  # cases whose shards, units or sums differ for more than two ranks
    *(
        "adamw, clipped",
        "momentum, clipped by the largest",
        "passes, clipped, by a plan's state",
        "frozen",
    ),
    *(
        "unused, tied over blocks",
        "units by class",
        "units by size",
        "layers beside blocks",
        "state, clipped",
    ),
    *(
        "state, passes, accumulated, tied",
        "state, accumulated, unused, validated",
        "state, frozen, a penalty",
    ),
    *(
        "the first rank without rows, clipped, validated",
        "two ranks without rows, adapters, tied",
    ),
    *(
        "adapters, whole, in a window",
        "adapters, packed, in passes",
        "adapters, packed, checkpointed, failed",
    ),
)
OF_TWO = (*SMALL, *(name for name in programs.CASES if name not in (*OF_THREE, *SMALL)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoint that three ranks write."""
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def trained(trainer_ranks: Callable[..., list[Any]], folder: Path) -> list[Any]:
    """Return the results and refusals of each of three ranks."""
    return trainer_ranks(
        "tests.support.torch_shard_ranks.train_all", 3, OF_THREE, str(folder), world=3
    )


@pytest.fixture(scope="module")
def others(
    trainer_ranks: Callable[..., list[Any]], trained: list[Any], folder: Path
) -> dict[int, list[Any]]:
    """Return the results for other numbers of ranks, also from the checkpoint on."""
    names = {2: OF_TWO, 4: SMALL[:1]}
    train = "tests.support.torch_shard_ranks.train_all"
    return {
        world: trainer_ranks(train, world, names[world], str(folder), world=world)
        for world in names
    }


@cache
def one_process(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    return programs.reference(programs.CASES[name], 8)


def check(ranks: list[Any], name: str) -> None:
    """Check that every rank has the weights and gradient norms of the plain loop."""
    weights, norms = one_process(name)
    for rank in ranks:
        assert rank[name]["norms"] == pytest.approx(norms, abs=1e-12)
        assert {"words.weight", "blocks.2.up.bias"} <= set(rank[name]["weights"])
        for each, mine in rank[name]["weights"].items():
            torch.testing.assert_close(mine, weights[each], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OF_THREE)
def test_it_learns_what_one_process_learns(trained: list[Any], name: str) -> None:
    check(trained, name)


@pytest.mark.parametrize(("world", "name"), [*[(2, name) for name in OF_TWO], (4, SMALL[0])])
def test_other_numbers_of_ranks_do_too(others: dict[int, list[Any]], world: int, name: str) -> None:
    check(others[world], name)


@pytest.mark.parametrize("name", [name for name in programs.CASES if "without rows" in name])
def test_a_rank_without_rows_soon_computes_nothing(
    trained: list[Any], others: dict[int, list[Any]], name: str
) -> None:
    """A rank without rows computes a filler row only until two passes are equal.

    The first one gathers units in another order.
    """
    shares = programs.CASES[name].shares
    ranks = trained if len(shares) == 3 else others[len(shares)]
    recomputed = 1 if programs.CASES[name].checkpoint is None else 2
    for share, rank in zip(shares, ranks, strict=True):
        rows = rank[name]["computed"]
        if share:
            assert len(rows) >= programs.STEPS * recomputed
        else:
            assert set(rows) == {1}
            assert len(rows) <= 3 * recomputed < programs.STEPS * recomputed


@pytest.mark.parametrize("name", programs.CASES)
def test_the_trainings_moved_the_weights(name: str) -> None:
    """The weights have moved, so the comparison is meaningful."""
    start = dict(programs.make_model(programs.CASES[name]).named_parameters())
    weights, _ = one_process(name)
    assert max(float((weights[each] - start[each]).detach().abs().max()) for each in start) > 1e-3


@pytest.mark.parametrize("world", [2, 4])
def test_other_numbers_of_ranks_train_on_from_a_checkpoint(
    trained: list[Any], others: dict[int, list[Any]], world: int
) -> None:
    """The shares of rows and of state differ."""
    ranks = others[world]
    weights, _ = programs.reference(programs.SAVED, 8)
    for rank in (*(each["on"] for each in ranks), *(each["saved"]["weights"] for each in trained)):
        for name, mine in rank.items():
            torch.testing.assert_close(mine, weights[name], rtol=0, atol=1e-12)
    assert all(int(rank["on"]["seen"]) == programs.STEPS for rank in ranks), "buffers too"


def finish_alone(
    model_state: dict[str, Any], optimizer_state: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the final weights after training by plain PyTorch from the checkpoint on."""
    model = programs.make_model(programs.SAVED)
    update = programs.make_optimizer(programs.SAVED, model)
    model.load_state_dict(model_state)
    update.load_state_dict(optimizer_state)
    inputs, labels = programs.data().tensors
    for step, rows in zip(range(programs.STEPS), programs.batches(8), strict=False):
        if step >= programs.SAVED_AT:
            programs.objective(programs.SAVED, model, inputs[rows], labels[rows]).backward()
            programs.finish(programs.SAVED, step, model, update)
    return {name: each.detach() for name, each in model.state_dict().items()}


def test_plain_pytorch_trains_on_from_it(trained: list[Any], folder: Path) -> None:
    saved = trained[0]["saved"]
    weights, _ = programs.reference(programs.SAVED, 8)
    for name, mine in finish_alone(saved["model"], saved["optimizer"]).items():
        torch.testing.assert_close(mine, weights[name], rtol=0, atol=1e-12)
    assert all(rank["saved"]["model"] == rank["saved"]["optimizer"] == {} for rank in trained[1:])
    index = json.loads((folder / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 3, "a unit at a time"
    for name, file in index["weight_map"].items():
        stored = load_file(folder / file)[name]
        torch.testing.assert_close(stored, saved["model"][name], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The plan was measured")
def test_one_rank_trains_on_from_it(trained: list[Any], folder: Path, tmp_path: Path) -> None:
    """The one rank holds the whole model, and writes a checkpoint that it can read again."""
    split = Split(example_plan((8,)))
    made = []
    for source in (folder, tmp_path):
        model = split.shard(programs.make_model(programs.SAVED))
        for each in model.parameters():
            each.data.fill_(0.5)
        update = programs.make_optimizer(programs.SAVED, model)
        assert split.load(source, model, update)["loop"]
        split.save(tmp_path, model, update, {"loop": split.state_dict()})
        made.append((split.model_state(model), split.optimizer_state(update)))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3, "weights, buffers, optimizer"
    weights, _ = programs.reference(programs.SAVED, 8)
    for own in made:
        for name, mine in finish_alone(*own).items():
            torch.testing.assert_close(mine, weights[name], rtol=0, atol=1e-12)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(trained: list[Any]) -> None:
    for rank in trained:
        assert "RequestError: The checkpoint /dev/full/there can't be written" in rank["full disk"]


def test_a_broken_checkpoint_is_an_error_on_every_rank_before_weights_are_overwritten(
    trained: list[Any],
) -> None:
    for rank in trained:
        for name, words in (
            ("gone", "can't be loaded"),
            ("cut", "can't be loaded"),
            ("other", "Name another folder"),
        ):
            said, unchanged = rank["broken"][name]
            assert "RequestError: The checkpoint" in said
            assert words in said
            assert unchanged
        said, without_state = rank["broken"]["bad disk"]
        assert "can't be read: Input/output error" in said
        assert without_state


def test_parameters_of_one_type_may_have_other_kinds_of_state(trained: list[Any]) -> None:
    state = trained[0]["kinds"]["state"]
    first, others = (group["params"] for group in trained[0]["kinds"]["param_groups"])
    assert all("momentum_buffer" in state[each] for each in first)
    assert all(
        "momentum_buffer" not in state[each] and "square_avg" in state[each] for each in others
    )


def test_buffers_are_those_of_the_first_rank(trained: list[Any]) -> None:
    assert [rank["buffers"] for rank in trained] == [[5, 11]] * 3


def test_the_norm_of_half_precision_does_not_overflow(trained: list[Any]) -> None:
    elements = sum(each.numel() for each in programs.make_model(programs.ShardCase()).parameters())
    for rank in trained:
        assert rank["norm in half"] == pytest.approx(50 * elements**0.5, rel=1e-2)


def test_on_two_gpus_too(gpu_ranks: Callable[..., list[Any]]) -> None:
    """Tests NCCL's uneven lists."""
    ranks = gpu_ranks("tests.support.torch_shard_ranks.train_all", 2, SMALL, "")
    for name in SMALL:
        for rank in ranks:
            rank[name]["weights"] = {
                each: tensor.cpu() for each, tensor in rank[name]["weights"].items()
            }
        check(ranks, name)


def test_state_is_held_by_memory_not_by_rows(trained: list[Any]) -> None:
    """Ranks with rows 5:2:1 hold 1:2:5 of parameters, gradients and optimizer state."""
    for name in ("adamw, clipped", "units by class", "state, clipped"):
        for kind in ("shards", "gradients", "state"):
            held = [rank[name]["most"][kind] for rank in trained]
            assert [each / sum(held) for each in held] == pytest.approx(
                [1 / 8, 2 / 8, 5 / 8],
                abs=0.04,  # a part is a multiple of 8 elements
            )
        assert all(rank[name]["now"]["gathered"] == 0 for rank in trained)


def test_blocks_and_what_is_as_large_are_units() -> None:
    """Blocks and equally large layers are units; a tied layer belongs to the model's own unit."""
    model = programs.make_model(programs.ShardCase())
    assert list(choose_units(model, None)) == ["blocks.0", "blocks.1", "blocks.2"]
    model.head = torch.nn.Linear(programs.WIDTH, 100)
    assert list(choose_units(model, None)) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    model.head = torch.nn.Linear(programs.WIDTH, 12)  # a third of a block
    assert list(choose_units(model, None)) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert list(choose_units(model, model.blocks)) == ["blocks.0", "blocks.1", "blocks.2"]
    model.named = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2)})
    assert list(choose_units(model, [model.named, torch.nn.GRU, model.head])) == [
        "head",
        "named.one",
    ]
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(programs.WIDTH, programs.WIDTH) for _ in range(9))
    )
    assert list(choose_units(layers, None)) == [str(number) for number in range(9)]


def test_bfloat16_computes_on_shards_in_float32(trained: list[Any]) -> None:
    model, start = (
        programs.make_model(HALF).float(),
        programs.make_model(HALF).float().state_dict(),
    )
    update = programs.make_optimizer(HALF, model)
    inputs, labels = programs.data().tensors
    for step, rows in zip(range(3), programs.batches(8), strict=False):
        programs.objective(HALF, model, inputs[rows], labels[rows]).backward()
        programs.finish(HALF, step, model, update)
    expected = {name: each.detach() for name, each in model.named_parameters()}
    moved = max(float((each - start[name]).abs().max()) for name, each in expected.items())
    for rank in trained:
        assert rank["half"]["types"] == ({torch.float32}, {torch.bfloat16})
    for name, each in expected.items():
        torch.testing.assert_close(
            trained[0]["half"]["weights"][name], each, rtol=0, atol=0.1 * moved
        )


def test_a_unit_is_gathered_and_reduced_at_once(trained: list[Any]) -> None:
    """A unit is gathered at once, even if its parameters have several types.

    Layers are gathered in bfloat16 and norms in float32. In a step, three blocks and the model
    itself are gathered for the forward pass, all but the last block and the model again for the
    backward pass, and each is reduced. Over gloo, each takes a collective per rank; the other three
    are for used parameters and for buffers.
    """
    for rank in trained:
        assert rank["autocast"]["wrong"] == []
        assert rank["autocast"]["collectives"] <= 3 * (4 + 2 + 4) + 3


def test_gradients_in_bfloat16_are_sent_so_and_summed_in_float32(trained: list[Any]) -> None:
    """One process computes each rank's rows as a batch, and adds up in float32.

    A rank sends others what they hold, which is at most 7 of 8 parts, in bfloat16.
    """
    start, model = trained[0]["autocast"]["start"], programs.make_model(HALF).float()
    model.load_state_dict(start, strict=False)
    inputs, labels = programs.data().tensors
    rows = next(programs.batches(8))
    summed = dict.fromkeys(start, torch.zeros(()))
    for own in (rows[:5], rows[5:7], rows[7:]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = programs.objective(HALF, model, inputs[own], labels[own])
        loss.backward()
        for name, each in model.named_parameters():
            summed[name] = summed[name] + each.grad * (len(own) / 8)
        model.zero_grad()
    for name, each in start.items():
        mine = trained[0]["autocast"]["weights"][name]
        torch.testing.assert_close(mine, each - RATE * summed[name], rtol=0, atol=1e-6)
    halves = sum(2 * each.numel() for name, each in start.items() if each.ndim == 2)
    assert max(rank["autocast"]["sent"] for rank in trained) < 1.3 * halves


def test_weights_that_arrive_late_are_those_that_autograd_saved(trained: list[Any]) -> None:
    """Gloo copies them to a GPU while a thread waits; autograd refuses tensors changed since."""
    _, norms = programs.reference(LATE, 8)
    for rank in trained:
        assert rank["late"]["norms"] == pytest.approx(norms[:3], abs=1e-12)


def test_a_rank_holds_what_is_expected_of_it(trained: list[Any]) -> None:
    """A rank holds its part of parameters and gradients, and a few whole units.

    Two units are gathered; one has gradients, and another's are being received. The rank with 5 of
    8 parameters receives more gradients than a unit has: 5/8 of each of two ranks'.
    """
    for rank in trained:
        peak, expected = rank["held"]
        assert 0.97 * expected <= peak <= 1.01 * expected, "headers are 16 bytes a part"


def test_out_of_memory_in_a_unit_is_reported_on_all_ranks(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    other, own = trainer_ranks("tests.support.torch_shard_refusals.leave", world=2)
    assert "ranks meet in each unit of a sharded model" in own
    assert "rank 1 ended" in other
    assert "out of memory" in other


@pytest.mark.parametrize("refusal", refusals.REFUSED)
def test_what_cannot_be_sharded_is_refused_on_every_rank(trained: list[Any], refusal: str) -> None:
    words, _ = refusals.REFUSED[refusal]
    for rank in trained:
        assert words in rank["refused"][refusal]
