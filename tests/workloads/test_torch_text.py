"""PyTorch workloads whose rows have lengths: passes, row assignment and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.balancer.jobs import make_job
from evener.balancer.probes.child_prober import make_prober
from evener.balancer.request import Request
from evener.balancer.types import Layout, Probe, Timed, layout_of
from evener.errors import RequestError
from evener.shares.curves import Cost, Work
from evener.workloads import registry
from evener.workloads.protocol import WorkerSetup
from evener.workloads.torch_backend.batches import Data, Lengths, read_lengths
from evener.workloads.torch_backend.models import Decoder, Texts, make_recipe, pad_texts
from evener.workloads.torch_backend.workload import TorchWorkload
from tests.support.cores import two_cores

pytestmark = pytest.mark.slow

CPU = WorkerSetup(("CPU:0",), threads=1)
MODEL: dict[str, Any] = {"vocabulary": 32, "longest": 64, "width": 8, "layers": 1, "heads": 2}
TEXTS: dict[str, Any] = {
    "rows": 200,
    "median": 12.0,
    "sigma": 0.8,
    "longest": 64,
    "vocabulary": 32,
    "seed": 0,
}
SETTINGS = {**MODEL, **TEXTS}
COST = Cost(0.001, 1e-5, 1e-8)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Restore the number of threads, which a workload sets for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workload() -> TorchWorkload:
    return TorchWorkload(CPU, lambda: make_recipe(MODEL, TEXTS, 0.001))


def step(workload: TorchWorkload) -> Work:
    """Return the work of one step."""
    before = workload.work() or Work(0, 0, 0, 0)
    workload.step()
    after = workload.work()
    assert after is not None
    pairs = zip(msgspec.structs.astuple(after), msgspec.structs.astuple(before), strict=True)
    return Work(*(now - then for now, then in pairs))


def test_assigned_rows_alone_do_without_the_attention_that_makes_a_plan_for_each_shape(
    workload: TorchWorkload,
) -> None:
    """cuDNN's attention, which plans each shape anew, is disabled only for assigned rows.

    This also holds if the same child has measured assigned rows before.
    """
    workload.prepare_assigned((8,), (COST,), (0,))
    workload.step()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    workload.prepare((8,))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    workload.step()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_each_probe_of_the_same_row_assignment_has_other_batches(workload: TorchWorkload) -> None:
    """Each probe of the same row assignment has other batches; other layouts have the same rows.

    Shapes that were seen before are faster than those that training will see.
    """
    tokens = []
    for cost in (COST, COST, Cost(0.5, 1e-5, 1e-8)):
        workload.prepare_assigned((8,), (cost,), (0,))
        tokens.append(tuple(step(workload).tokens for _ in range(3)))
    assert tokens[0] != tokens[1]
    assert tokens[0] == tokens[2]


def test_a_decoder_sees_no_later_token() -> None:
    """Causal attention ignores later tokens, so padding at the end changes nothing."""
    torch.manual_seed(0)
    decoder, tokens = Decoder(**MODEL).eval(), torch.randint(1, 32, (2, 20))
    changed = torch.cat([tokens[:, :12], torch.zeros(2, 8, dtype=torch.long)], 1)
    torch.testing.assert_close(decoder(tokens)[:, :12], decoder(changed)[:, :12])
    assert not torch.allclose(decoder(tokens)[:, 12:], decoder(changed)[:, 12:])


def test_texts_are_the_same_for_a_seed_and_padded_to_their_longest() -> None:
    texts, again = Texts(**TEXTS), Texts(**TEXTS)
    assert texts.lengths == again.lengths
    assert len(set(texts.lengths)) > 20
    assert max(texts.lengths) <= 64
    inputs, targets = pad_texts([texts[row] for row in range(5)])
    assert inputs.shape == targets.shape == (5, max(texts.lengths[:5]))
    assert [(row != -100).sum().item() for row in targets] == texts.lengths[:5]
    assert torch.equal(inputs[0][1 : texts.lengths[0]], targets[0][: texts.lengths[0] - 1])


def test_facts_have_an_even_sample_of_the_lengths(workload: TorchWorkload) -> None:
    """The facts have an even sample of the lengths, including the longest."""
    sample = list(map(int, workload.facts()["lengths"].split()))
    lengths = Texts(**TEXTS).lengths
    assert sample == sorted(sample)
    assert sample[-1] == max(lengths)
    assert sum(sample) / len(sample) == pytest.approx(sum(lengths) / len(lengths), rel=0.1)


def test_random_rows_are_padded_to_the_longest_of_the_share(workload: TorchWorkload) -> None:
    """Random rows are padded to the longest of the share.

    This includes passes, as the batch is split after it was collated.
    """
    workload.prepare((16,))
    whole = step(workload)
    workload.prepare((16,), (4,))
    cut = step(workload)
    assert whole.passes == 1
    assert whole.padded == 16 * max(1, round(whole.padded / 16))
    assert whole.padded_lengths == whole.padded * whole.padded / 16
    assert whole.tokens < whole.padded
    assert cut == msgspec.structs.replace(whole, passes=4)


def test_rows_of_one_length_are_padded_to_it_in_every_pass(workload: TorchWorkload) -> None:
    length = sorted(Texts(**TEXTS).lengths)[100]
    workload.prepare_length((12,), (4,), length)
    for _ in range(2):
        work = step(workload)
        assert (work.passes, work.padded, work.padded_lengths) == (
            3,
            12 * length,
            12 * length * length,
        )
    workload.prepare_length((300,), (), length)  # more rows than there are
    assert step(workload).padded == 300 * length


def test_assigned_rows_have_little_padding_and_keep_to_the_tokens_of_a_pass(
    workload: TorchWorkload,
) -> None:
    """Assigned rows have little padding and respect the tokens of a pass.

    The rows of a global batch are the same as without lengths.
    """
    workload.prepare((32,))
    plain = [step(workload) for _ in range(6)]
    workload.prepare_assigned((32,), (COST,), (0,))
    assigned = [step(workload) for _ in range(6)]
    assert [each.tokens for each in assigned] == [each.tokens for each in plain]
    assert all(
        each.padded < 0.7 * other.padded for each, other in zip(assigned, plain, strict=True)
    )
    workload.prepare_assigned((32,), (msgspec.structs.replace(COST, fixed_s=10.0),), (128,))
    assert all(each.passes >= each.padded / 128 for each in (step(workload) for _ in range(6)))
    assert workload.loss_is_finite()


def test_rows_of_equal_length_are_as_without_lengths() -> None:
    """Rows of equal length have no lengths in the facts, and the batches are unchanged."""
    rows = torch.utils.data.TensorDataset(torch.arange(40))
    assert read_lengths([7] * 40, 40) is None
    plain, equal = Data(rows), Data(rows, {"lengths": [7] * 40})
    assert equal.lengths is None
    assert type(equal.sampler((8,), 0)) is type(plain.sampler((8,), 0))
    assert list(equal.sampler((5, 3), 1)) == list(plain.sampler((5, 3), 1))
    workload = TorchWorkload(CPU, lambda: make_recipe(MODEL, {**TEXTS, "sigma": 0.0}, 0.001))
    assert "lengths" not in workload.facts()
    workload.prepare((4,))
    workload.step()
    assert workload.work() is None


def test_the_longest_rows_up_to_a_length_stand_for_it() -> None:
    lengths = Lengths([5, 9, 1, 7, 3], 5)
    assert lengths.nearest(7, 3).tolist() == [3, 0, 4]
    assert lengths.nearest(8, 2).tolist() == [3, 0]
    assert lengths.nearest(3, 5).tolist() == [4, 2, 4, 2, 4]
    assert lengths.sample() == (1, 3, 5, 7, 9)
    assert lengths.longest_row == 1


OWN = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, row):
        return torch.full((row % 7 + 1,), float(row))

def collate(rows):
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows]), torch.zeros(len(rows))

def build():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x * self.scale).mean(1)

    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.1), torch.nn.functional.mse_loss

def training_data():
    return Rows(), {"collate_fn": collate}

def lengths(dataset):
    return LENGTHS
"""  # noqa: E501


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("[row % 7 + 1 for row in range(len(dataset))]", ""),
        ("[1] * 29", "There are 29 lengths for 30 rows of data"),
        ("[-1] * 30", "has length -1"),
        ("3", "lengths of the training data are of type int"),
    ],
)
def test_a_function_beside_the_data_says_lengths(tmp_path: Path, said: str, named: str) -> None:
    """A `lengths` function returns the lengths; wrong ones raise an error before the first step."""
    path = tmp_path / "train_texts.py"
    path.write_text(OWN.replace("LENGTHS", said))

    def build() -> Any:
        return registry.build(f"{path}:build", CPU, {}, "torch")

    if named:
        with pytest.raises(RequestError, match=named):
            build()
    else:
        workload = build()
        assert workload.facts()["lengths"].split() == sorted(str(row % 7 + 1) for row in range(30))
        workload.prepare_assigned((12,), (Cost(1e-6, 1e-5, 0.0),), (0,))
        workload.step()
        assert workload.work().padded < 12 * 7


@two_cores
@pytest.mark.usefixtures("shared_servers")
def test_children_measure_rows_that_are_assigned_by_cost() -> None:
    """Two real ranks measure tokens of whole batches and each rank's compute time (own work).

    There is less padding than with rows in their original order.
    """
    settings = {**SETTINGS, "median": 24.0, "width": 16}
    request = Request(
        "cpu:0,cpu:1", workload="torch_text", framework="torch", settings=settings, share=True
    )
    prober = make_prober(make_job(request))
    stop = threading.Event()

    def time(layout: Layout, stage: Any) -> Timed:
        (seen,) = prober.measure((Probe(layout, stage, 0.3, steps=16),), lambda _: None, stop)
        assert isinstance(seen, Timed), seen
        return seen

    try:
        plain = time(layout_of((16, 16)), "race")
        assigned = time(
            Layout(
                "split",
                (20, 12),
                costs=(COST, msgspec.structs.replace(COST, per_token_s=2e-5)),
                tokens=(0, 256),
            ),
            "split",
        )
    finally:
        prober.close()
    lengths = prober.facts().lengths
    assert lengths == tuple(sorted(lengths))
    for one in (plain, assigned):
        assert one.tokens == pytest.approx(32 * sum(lengths) / len(lengths))
        assert one.work[0] is not None
        assert one.work[1] is not None
    assert assigned.padding < plain.padding
