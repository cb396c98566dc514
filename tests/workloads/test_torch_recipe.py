"""PyTorch workloads: network sizes, training steps, refused setups, exact groups."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from evener.errors import EvenerError, RequestError
from evener.torch.rows.loader import StepListener
from evener.torch.rows.sampler import UnevenBatchSampler
from evener.workloads import registry
from evener.workloads.datasets import digits
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend import batches as torch_batches
from evener.workloads.torch_backend.batches import Batches, Data, Pool
from evener.workloads.torch_backend.models import GruNet, classifier, maxer, mnist
from evener.workloads.torch_backend.user_model import from_user
from evener.workloads.torch_backend.workload import Recipe, TorchWorkload
from evener.workloads.user_code import find_line
from tests.workloads import torch_group_rank as RANK  # noqa: N812 - its sizes are constants

pytestmark = pytest.mark.slow

CPU = WorkerSetup(("CPU:0",), threads=1)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Restore the number of threads, which a workload sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_models_have_the_sizes_of_their_twins() -> None:
    """Both networks have the parameter counts of their Keras versions.

    A GRU layer has 3 units (inputs + units + 2 biases) parameters.
    """
    with torch.device("meta"):
        large, small, gru = maxer(), mnist(16, 64), GruNet(32, 512, 4, 128, 10)
    assert count(large) == 78_923_530
    assert count(small) == 160 + 4_640 + 100_416 + 650
    assert (
        count(gru)
        == 3 * 512 * (32 + 512 + 2)
        + 3 * (3 * 512 * (512 + 512 + 2))
        + 512 * 128
        + 128
        + 128 * 10
        + 10
    )


@pytest.mark.parametrize(
    ("name", "settings", "rows", "steps"),
    [
        ("torch_mnist", {"filters": 4, "dense": 16, "learning_rate": 0.01}, 48, 60),
        (
            "torch_gru",
            {"steps": 8, "units": 24, "layers": 1, "dense": 16, "learning_rate": 0.01},
            64,
            150,
        ),
    ],
)
def test_a_workload_learns(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], rows: int, steps: int
) -> None:
    """After a few steps, the loss on another batch is clearly below that of guessing among ten."""
    monkeypatch.setattr(torch_batches, "POOL_ROWS", 4096)
    workload = registry.build(name, CPU, settings, "torch")
    workload.prepare((rows,))
    for _ in range(steps):
        workload.step()
    workload.synchronize()
    assert isinstance(workload, TorchWorkload)
    inputs, targets = workload._open_batches().take()
    with torch.no_grad():
        assert float(workload._objective(inputs, targets)) < 2.0


def test_a_loss_that_is_lost_is_seen_and_the_rows_of_the_data_are_known() -> None:
    """The loss is finite for valid rows and not for NaN; generated rows are no data set."""
    data = TensorDataset(torch.ones(40, 4), torch.zeros(40, 2))
    for value, sound in ((1.0, True), (math.nan, False)):
        module = torch.nn.Linear(4, 2)
        recipe = Recipe(
            module, torch.optim.SGD(module.parameters(), lr=0.1), torch.nn.MSELoss(), Data(data)
        )
        workload = TorchWorkload(CPU, lambda recipe=recipe: recipe)  # type: ignore[misc]
        data.tensors[0].fill_(value)
        workload.prepare((8,))
        assert workload.loss_is_finite()
        workload.step()
        assert workload.loss_is_finite() is sound
        assert workload.facts()["rows"] == "40"
    assert registry.build("torch_mnist", CPU, {}, "torch").facts()["rows"] == "0"


def test_another_size_is_prepared_and_memory_grows_with_it(
    trainer_ranks: Callable[..., list[Any]],
) -> None:
    """Peak memory grows with the batch size.

    Measured in a new process, as memory freed by earlier tests would hide what a step needs.
    """
    (peaks,) = trainer_ranks("tests.workloads.torch_group_rank.save_peaks")
    assert all(peaks)
    assert peaks[1] > peaks[0] + (20 << 20)
    assert peaks[2] < peaks[1] - (20 << 20)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_trains_with_weights_in_float32(
    monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    """The loss is within 0.05 of that in float32 after 16 steps; fp16's loss scale stays finite."""
    # the same rows, also on a busy machine
    monkeypatch.setattr(torch_batches, "SLOW_ROW_SECONDS", math.inf)
    monkeypatch.setattr(torch_batches, "POOL_ROWS", 1024)
    losses = {}
    for each in ("float32", precision):
        workload = TorchWorkload(
            WorkerSetup(("CPU:0",), threads=1, precision=each),
            lambda: classifier(mnist(4, 16), 1e-3, digits),
        )
        workload.prepare((32,))
        for _ in range(16):
            workload.step()
        inputs, targets = workload._open_batches().take()
        with torch.no_grad():
            losses[each] = float(workload._objective(inputs, targets))
        assert {parameter.dtype for parameter in workload.recipe.module.parameters()} == {
            torch.float32
        }
        assert workload._scaler.is_enabled() == (each == "mixed_float16")
        assert 0 < workload._scaler.get_scale() < float("inf")
    assert losses[precision] == pytest.approx(losses["float32"], abs=0.05)


def feed(data: Data, on_device: bool = False) -> Batches:
    return Batches(data, torch.device("cpu"), on_device, StepListener())


def numbers(rows: int) -> TensorDataset:
    """Return a data set in which row i is i."""
    return TensorDataset(torch.arange(rows), torch.arange(rows))


def test_a_pool_goes_round_for_any_batch() -> None:
    """All rows are used equally often, also if a batch is larger than the pool."""
    made: list[int] = []

    def sample(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(rows)
        return numbers(rows).tensors

    data = Data(Pool(sample, "cpu"))
    assert max(made) == data.rows <= torch_batches.POOL_ROWS
    batches = feed(data)
    for rows in (data.rows // 2, data.rows, 3 * data.rows):
        batches.make(batches.data.sampler([rows], 0))
        seen = torch.cat([batches.take()[0] for _ in range(2)])
        assert torch.bincount(seen).unique().tolist() == [2 * rows // data.rows]
    batches.drop()
    assert batches.rows == 0


def test_a_pool_of_large_or_slow_rows_is_small() -> None:
    assert len(Pool(lambda rows: torch.zeros(rows, 1 << 20), "cpu")) == 8

    def slow(rows: int) -> torch.Tensor:
        if rows == torch_batches.SAMPLE_ROWS:
            time.sleep(0.01)
        return torch.zeros(rows, 1)

    assert len(Pool(slow, "cpu")) == torch_batches.SLOW_POOL_ROWS


def test_a_data_set_is_fed_epoch_after_epoch_by_its_own_options() -> None:
    """Each rank gets its part of the full batches that training would see.

    The order is that of the data set's own loader.
    """
    calls: list[int] = []

    def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(rows))
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    parts = [feed(Data(numbers(20), {"collate_fn": collate})) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.make(part.data.sampler([5, 3], rank))
    seen = [torch.cat([part.take()[0] for part in parts]) for _ in range(4)]
    assert calls == [5, 3] * 4
    sampler = UnevenBatchSampler(20, [8], 0, drop_last=True)
    expected = list(sampler)
    sampler.set_epoch(1)
    assert [rows.tolist() for rows in seen] == expected + list(sampler)


def test_a_batch_larger_than_the_data_takes_rows_in_turn() -> None:
    batches = feed(Data(numbers(6)))
    batches.make(batches.data.sampler([12], 0))
    assert torch.bincount(batches.take()[0]).tolist() == [2] * 6


def test_one_batch_stays_on_the_device() -> None:
    held = feed(Data(numbers(20)), on_device=True)
    held.make(held.data.sampler([8], 0))
    assert held.take()[0] is held.take()[0]


def test_fetched_ahead_batches_are_there_when_steps_have_been_timed() -> None:
    batches = feed(Data(numbers(64), {"prefetch": 2}))
    batches.make(batches.data.sampler([4], 0))
    taken = [batches.take()[0] for _ in range(3)]
    batches.wait()
    assert batches._loader is not None
    assert len(batches._loader._ahead._ready) == 2  # type: ignore[union-attr]
    batches.drop()
    assert "evener-prefetch" not in {thread.name for thread in threading.enumerate()}
    assert torch.cat(taken).tolist() == [
        row for batch in list(UnevenBatchSampler(64, [4], 0))[:3] for row in batch
    ]


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        (WorkerSetup(("CPU:0",), xla=True), "XLA"),
        (WorkerSetup(("GPU:0", "GPU:1")), "2 in one"),
    ],
)
def test_a_setup_that_torch_cannot_serve_is_a_one_line_error(
    setup: WorkerSetup, named: str
) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        registry.build("torch_mnist", setup, {}, "torch")
    assert caught.value.remedy


@pytest.mark.parametrize("shares", [(), (0,), (-1,), (4, 4)])
def test_shares_for_another_number_of_devices_are_a_one_line_error(shares: tuple[int, ...]) -> None:
    workload = registry.build("torch_mnist", CPU, {"filters": 1, "dense": 2}, "torch")
    with pytest.raises(RequestError):
        workload.prepare(shares)


def test_a_group_takes_the_steps_of_one_process(trainer_ranks: Callable[..., list[Any]]) -> None:
    """Three ranks with changing shares have the float64 weights of one process, within 1e-12.

    One rank is left out for a while. Then the others wait for the first rank, which pauses before
    each step.
    """
    ended = trainer_ranks("tests.workloads.torch_group_rank.train", world=3)
    assert {each["facts"]["engine"] for each in ended} == {"ddp"}
    # before the first step, other ranks may not be ready yet
    pauses = (RANK.STEPS - 1) * RANK.PAUSE_SECONDS
    assert all(each["waited"] > 0.5 * pauses for each in ended[1:])
    assert {(each["waited since"], each["on a CPU"]) for each in ended} == {(0, None)}
    # this rank was left out before
    assert all(map(torch.equal, ended[1]["weights"][3], ended[0]["weights"][3]))
    torch.manual_seed(0)
    recipe = RANK.recipe()
    assert recipe.data is not None
    assert recipe.loss is not None
    for turn, sizes in enumerate(RANK.SIZES):
        whole = feed(recipe.data)
        whole.make(whole.data.sampler([sum(sizes)], 0))
        for _ in range(RANK.STEPS):
            inputs, targets = whole.take()
            recipe.optimizer.zero_grad()
            recipe.loss(recipe.module(inputs), targets).backward()
            recipe.optimizer.step()
        for rank, size in enumerate(sizes):
            for mine, expected in zip(
                ended[rank]["weights"][turn], recipe.module.parameters(), strict=True
            ):
                if size and turn < 3:  # momentum starts again for a returning rank
                    torch.testing.assert_close(mine, expected.detach(), rtol=0, atol=1e-12)


OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(5, width)
        self.second = torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def build(width=8, rate=0.1):
    net = Net(width)
    return net, torch.optim.SGD(net.parameters(), rate), torch.nn.functional.cross_entropy

def keywords():
    net = Net(3)
    return {"module": net, "optimizer": torch.optim.Adam(net.parameters()), "loss": lambda out, y: out.square().mean(),
            "sample_batch": lambda n: ({"x": torch.randn(n, 5)}, None)}

def no_optimizer():
    return Net(3), None, None

def other_optimizer():
    return Net(3), torch.optim.SGD(Net(3).parameters(), 0.1), None

def raises():
    raise ValueError("no such layer")

def bad_loss():
    net = Net(3)
    return net, torch.optim.SGD(net.parameters(), 0.1), lambda out, y: out.nothing

def short():
    net = Net(3)
    return (*build()[:3], lambda n: (torch.randn(1, 5), torch.zeros(n, dtype=torch.long)))

def sample_batch(n):
    return torch.randn(n, 5), torch.randint(0, 2, (n,))
"""  # noqa: E501


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "train_own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [("build", {}, 66), ("build", {"width": "4"}, 34), ("keywords", {}, 26)],
)
def test_the_users_own_module_trains(
    own: Path, name: str, settings: dict[str, Any], parameters: int
) -> None:
    workload = registry.build(f"{own}:{name}", CPU, settings, "torch")
    workload.prepare((12,))
    workload.step()
    workload.synchronize()
    assert workload.facts()["parameters"] == str(parameters)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("no_optimizer", "optimizer"),
        ("other_optimizer", "updates nothing"),
        ("raises", "no such layer"),
        ("bad_loss", "train_own.py:33"),
        ("short", "rows"),
    ],
)
def test_an_error_in_the_users_module_is_a_one_line_error(own: Path, name: str, named: str) -> None:

    def run() -> None:
        workload = registry.build(f"{own}:{name}", CPU, {}, "torch")
        workload.prepare((12,))
        workload.step()

    # the user's error, or evener's sentence with a hint
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    assert named in f"{find_line(caught.value)}: {caught.value}"
    assert isinstance(caught.value, EvenerError) or find_line(caught.value)


@pytest.mark.parametrize(
    "result", [None, 3, (1, 2), torch.nn.Linear(1, 1), {"modul": 1}, (None, None, None)]
)
def test_an_invalid_recipe_is_a_one_line_error(result: object) -> None:
    with pytest.raises(RequestError) as caught:
        from_user("train.py:build", result)
    assert caught.value.remedy


def test_a_batch_that_cannot_be_cut_is_a_one_line_error_only_in_passes() -> None:
    """A batch with an object that can't be split by rows is refused, but only in passes.

    Batch normalization in the module is in the facts.
    """

    class Graph:
        pass

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

        def forward(self, x: torch.Tensor, graph: Graph) -> torch.Tensor:
            return self.layers(x).square().mean()

    def recipe() -> Recipe:
        module = Own()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return Recipe(
            module,
            optimizer,
            None,
            sample_batch=lambda n: {"x": torch.randn(n, 4), "graph": Graph()},
        )

    workload = TorchWorkload(CPU, recipe)
    assert workload.facts()["batch_statistics"] == "BatchNorm1d"
    workload.prepare((6,))
    workload.step()
    with pytest.warns(UserWarning, match="one pass of 3 rows"):
        workload.prepare((6,), (3,))
    with pytest.raises(RequestError, match="A Graph in the batch can't be cut into passes"):
        workload.step()


def test_a_recipe_may_return_its_loss() -> None:
    """A module without a loss function returns its own loss, from keyword inputs."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    def recipe() -> Recipe:
        module = Own()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return Recipe(module, optimizer, None, sample_batch=lambda n: {"x": torch.randn(n, 4)})

    workload = TorchWorkload(CPU, recipe)
    workload.prepare((5,))
    before = workload.recipe.module.layer.weight.detach().clone()
    workload.step()
    assert not torch.equal(before, workload.recipe.module.layer.weight)
