"""PyTorch workloads: the seed's sizes, steps that train, places that are refused, groups that are exact."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from evener.errors import EvenerError, RequestError
from workloads import registry, torch_gru, torch_maxer, torch_mnist
from workloads.base import Place
from workloads.custom import UserCodeError
from workloads.torch_batches import Batches
from workloads.torch_own import from_user
from workloads.torch_recipe import Recipe, TorchWorkload

pytestmark = pytest.mark.slow

CPU = Place(("CPU:0",), threads=1)
SCRIPT = Path(__file__).with_name("torch_group_rank.py")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """A place sets the threads of the whole process: give them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_group_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANK = script()


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_models_have_the_sizes_of_their_twins() -> None:
    """The seed's count; the small network's; a GRU layer has 3 units (inputs + units + 2 biases) parameters."""
    assert count(torch_maxer.model()) == torch_maxer.PARAMETERS == 78_923_530
    assert count(torch_mnist.model(16, 64)) == 160 + 4_640 + 100_416 + 650
    gru = torch_gru.GruNet(32, 512, 4, 128, 10)
    assert count(gru) == 3 * 512 * (32 + 512 + 2) + 3 * (3 * 512 * (512 + 512 + 2)) + 512 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize("name", ["torch_maxer", "torch_mnist", "torch_gru"])
def test_the_registry_knows_each_with_its_settings(name: str) -> None:
    entry = registry.find(name, "torch")
    module = importlib.import_module(entry.home.partition(":")[0])
    assert entry.settings == module.SETTINGS


@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("torch_mnist", {"filters": 4, "dense": 16, "learning_rate": 0.01}, 48),
        ("torch_gru", {"steps": 8, "features": 4, "units": 12, "layers": 2, "dense": 8, "learning_rate": 0.01}, 40),
    ],
)
def test_a_workload_learns(name: str, settings: dict[str, Any], rows: int) -> None:
    """After 60 steps the loss on a batch is clearly below that of guessing one of ten."""
    workload = registry.build(name, CPU, settings, "torch")
    workload.prepare((rows,))
    for _ in range(60):
        workload.step()
    workload.synchronize()
    assert isinstance(workload, TorchWorkload)
    inputs, targets = workload._batches.take()
    with torch.no_grad():
        assert float(workload._objective(inputs, targets)) < 2.0


def test_another_size_is_prepared_and_memory_grows_with_it() -> None:
    workload = registry.build("torch_mnist", CPU, {}, "torch")
    peaks = []
    for rows in (16, 1024, 16):
        workload.prepare((rows,))
        workload.step()
        peaks.append(workload.peak_memory_bytes()[0])
    assert None not in peaks
    assert peaks[1] > peaks[0] + (20 << 20)
    assert peaks[2] < peaks[1] - (20 << 20)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_trains_with_weights_in_float32(precision: Any) -> None:
    """The loss comes near that of float32: within 0.05 after 40 steps; fp16's loss scale stays finite."""
    losses = {}
    for each in ("float32", precision):
        workload = TorchWorkload(
            Place(("CPU:0",), threads=1, precision=each),
            lambda: torch_mnist.recipe(4, 16, 1e-3),
            torch_mnist.sample_batch,
        )
        workload.prepare((32,))
        for _ in range(40):
            workload.step()
        inputs, targets = workload._batches.take()
        with torch.no_grad():
            losses[each] = float(workload._objective(inputs, targets))
        assert {parameter.dtype for parameter in workload.recipe.module.parameters()} == {torch.float32}
        assert workload._scaler.is_enabled() == (each == "mixed_float16")
        assert 0 < workload._scaler.get_scale() < float("inf")
    assert losses[precision] == pytest.approx(losses["float32"], abs=0.05)


def test_batches_come_in_turn_and_from_one_pool() -> None:
    batches = Batches(RANK.sample_batch, torch.device("cpu"), on_device=False)
    batches.make(8)
    first, second = batches.take()[0], batches.take()[0]
    assert first.shape == second.shape == (8, 7)
    assert not torch.equal(first, second)
    held = Batches(RANK.sample_batch, torch.device("cpu"), on_device=True)
    held.make(8)
    assert torch.equal(held.take()[0], held.take()[0])


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (Place(("CPU:0",), xla=True), "XLA"),
        (Place(("GPU:0", "GPU:1")), "2 in one"),
        (Place(("CPU:0",), engine="towers"), "towers"),
    ],
)
def test_a_place_that_torch_cannot_serve_is_one_sentence(place: Place, named: str) -> None:
    with pytest.raises(RequestError, match=named) as caught:
        registry.build("torch_mnist", place, {}, "torch")
    assert caught.value.remedy


@pytest.mark.parametrize("shares", [(), (0,), (-1,), (4, 4)])
def test_shares_for_another_place_are_one_sentence(shares: tuple[int, ...]) -> None:
    workload = registry.build("torch_mnist", CPU, {"filters": 1, "dense": 2}, "torch")
    with pytest.raises(RequestError):
        workload.prepare(shares)


def test_a_group_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    """Three ranks, shares that change, one rank left out for a while: float64 weights equal to 1e-12."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    results = [tmp_path / f"rank{rank}.pt" for rank in range(3)]
    children = [
        subprocess.Popen([*command, str(rank), port, "3", str(path)], stderr=subprocess.PIPE, text=True)
        for rank, path in enumerate(results)
    ]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], "\n".join(errors)
    ended = [torch.load(path) for path in results]
    assert {each["facts"]["engine"] for each in ended} == {"ddp"}
    torch.manual_seed(0)
    recipe = RANK.recipe()
    for turn, sizes in enumerate(RANK.SIZES):
        pools = [Batches(RANK.sample_batch, torch.device("cpu"), on_device=False) for size in sizes if size]
        for pool, size in zip(pools, [size for size in sizes if size], strict=True):
            pool.make(size)
        for _ in range(RANK.STEPS):
            parts = [pool.take() for pool in pools]
            inputs, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
            recipe.optimizer.zero_grad()
            recipe.loss(recipe.module(inputs), targets).backward()
            recipe.optimizer.step()
        for rank, size in enumerate(sizes):
            for mine, expected in zip(ended[rank]["weights"][turn], recipe.module.parameters(), strict=True):
                if size and turn < 3:  # one who was left out comes back without the momentum
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
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "train_own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [("build", {}, 66), ("build", {"width": "4"}, 34), ("keywords", {}, 26)],
)
def test_the_users_own_module_trains(own: Path, name: str, settings: dict[str, Any], parameters: int) -> None:
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
def test_what_is_wrong_with_the_users_module_is_one_sentence(own: Path, name: str, named: str) -> None:

    def run() -> None:
        workload = registry.build(f"{own}:{name}", CPU, {}, "torch")
        workload.prepare((12,))
        workload.step()

    with pytest.raises(EvenerError) as caught:
        run()
    assert named in caught.value.message
    assert caught.value.remedy or isinstance(caught.value, UserCodeError)  # a line of theirs says what to mend


@pytest.mark.parametrize("result", [None, 3, (1, 2), torch.nn.Linear(1, 1), {"modul": 1}, (None, None, None)])
def test_what_is_no_recipe_is_one_sentence(result: object) -> None:
    with pytest.raises(RequestError) as caught:
        from_user("train.py:build", result)
    assert caught.value.remedy


def test_a_recipe_may_return_its_loss() -> None:
    """A module with no loss function beside it returns the loss, from keyword inputs."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    def recipe() -> Recipe:
        module = Own()
        return Recipe(module, torch.optim.SGD(module.parameters(), 0.1), None)

    workload = TorchWorkload(CPU, recipe, lambda n: {"x": torch.randn(n, 4)})
    workload.prepare((5,))
    before = workload.recipe.module.layer.weight.detach().clone()
    workload.step()
    assert not torch.equal(before, workload.recipe.module.layer.weight)
