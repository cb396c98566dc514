"""`evener run` with many programs: a sample of those in benchmarks.run_programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.rank_server import RankServer, place_ranks
from tests.support.torch_start import free_port

skip_without("torch")

from evener.program.views import DIFFERENCES  # noqa: E402
from evener.torch.sums.collectives import USES_COLLECTIVES  # noqa: E402
from evener.torch.training_audits import CANT  # noqa: E402
from evener.training.audit import CAUSES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PARTS, SCRIPTS = "tests.support.run_parts", "tests.support.script_ranks"
EXACT = [
    ("exact_loops", "two models"),
    ("exact_loops", "steps counted"),
    ("exact_loops", "epochs left early"),
    ("exact_loops", "left in evaluation mode"),
    ("exact_loops", "folds"),
    ("exact_loops", "unfrozen and wrapped again"),
    ("exact_loops", "a model wrapped within an epoch"),
    ("exact_loops", "two models trained in turns"),
    ("unlike", "larger batches later"),
    ("unlike", "padding masked"),
    ("unlike", "a loader with its own iteration"),
    ("objects", "rows in an object"),
    ("objects", "graphs"),
    ("exchanges", "four sums over rows"),
    ("exchanges", "an epochs outputs gathered"),
    ("exchanges", "a schedule within steps"),
    ("exchanges", "a drawn number from the first rank"),
    ("exchanges", "rows gathered for metrics"),
    ("sharded", "sharded and clipped"),
    ("sharded", "sharded and replicated"),
    ("sharded", "sharded and accumulated"),
    ("sharded", "sharded with the loss inside"),
    ("sharded", "accumulated in fsdp1"),
    ("sharded", "a sum of a sharded model"),
    ("sums", "labels of all ranks counted before"),
    ("sums", "labels of all ranks counted after"),
    ("sums", "labels gathered by accelerate"),
]
OTHER = [
    ("sums", "a sum divided by own labels after", "a value of each rank's own rows"),
    ("sums", "a sum divided by len after", "may be a count of each rank's own rows"),
    ("sums", "a mean beside prepared rows", "for more rows than a rank has now"),
    ("sums", "a center by own rows", "goes into its loss"),
    ("losses", "rows mixed at random", "it isn't a mean over rows"),
    ("losses", "masked by a random count", "a count that depends on random numbers"),
    ("losses", "cut by the program", "where the program cuts its batch itself"),
    ("losses", "negatives in the batch", "it isn't a mean over rows"),
    ("losses", "negatives of all ranks", "exchange rows by all_gather"),
    ("exchanged", "rows gathered", "exchange rows by all_gather (run_exchanged.py:"),
    ("exchanged", "rows gathered by a function", "exchange rows by all_gather_tensor"),
    (
        "exchanged",
        "a center as a number",
        "goes into a number in its loss",
    ),
    ("other", "means of ranks", "goes into the rate of its optimizer"),
    ("exchanged", "a center from the first rank", "by broadcast (run_exchanged.py:"),
    ("exchanged", "a rate by exchanged losses", "goes into the rate of its optimizer"),
    ("exchanged", "gradients by exchanged losses", "goes into its gradients"),
    ("exchanged", "a codebook in the model", "goes into its model"),
    ("other", "steps by hand", "its rows don't come from a DataLoader"),
    ("exchanged", "rows counted over ranks", "exchange their numbers of rows by all_reduce"),
    ("objects", "nodes of graphs", "isn't a mean over rows"),
    ("objects", "stopped by a flag", "exchange a flag by all_reduce (run_objects.py:"),
    ("other", "own sharding", "aren't shared out by a DistributedSampler"),
    ("other", "variances of two tasks", "what isn't in a DistributedDataParallel"),
    ("other", "local steps", "gradients that they haven't exchanged"),
    ("unlike", "a loader without an end", "EndlessLoader, makes its batches by an iteration of"),
    ("unlike", "whole batches as items", "takes one item of its data set at a time"),
    ("unlike", "rows split on each rank", "different rows under the same numbers"),
    ("unlike", "rows drawn on each rank", "where each rank draws its rows"),
    ("unlike", "two loaders zipped", "take rows of several loaders"),
    ("unlike", "padding read last", "rows padded to the longest beside them"),
    ("sharded", "parts of a layer", "several ranks compute one row"),
    (
        "unlike",
        "rows handed out by one rank",
        "not every rank takes its rows from its own loader",
    ),
]
SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [pytest.mark.slow, two_cores]


@pytest.fixture(scope="module")
def server(rank_server: Callable[[str], RankServer]) -> RankServer:
    return rank_server("tests.support.torch_imports")


def run(server: RankServer, folder: Path, module: str, name: str) -> tuple[str, str]:
    """Return a program's outcome after a plain run and one with hooks, and evener's messages."""
    from tests.support.run_parts import judge

    module = f"tests.support.run_{module}"
    given = module, name, free_port()
    server.run(f"{PARTS}.run_twice", folder, *given, ranks=place_ranks(2), imports=module)
    found = judge(folder)
    return found.kind, found.words


@pytest.mark.parametrize(("module", "name"), EXACT)
def test_a_program_of_means_is_trained_by_shares(
    server: RankServer, tmp_path: Path, module: str, name: str
) -> None:
    assert run(server, tmp_path, module, name)[0] == "by shares"


def test_its_weights_are_bit_for_bit_the_same_where_noise_is_measured(
    server: RankServer, tmp_path: Path
) -> None:
    found, program = [], ("tests.support.run_exact_loops", "accumulated by no sync")
    for noise in (False, True):
        own = tmp_path / str(noise)
        server.run(f"{PARTS}.run_twice", own, *program, free_port(), noise, ranks=place_ranks(2))
        found += [json.loads((own / f"{rank}.json").read_text())[1] for rank in (0, 1)]
    assert found[0]["hooks"]
    assert all(each["weights"] == found[0]["weights"] for each in found)


@pytest.mark.parametrize(("module", "name", "words"), OTHER)
def test_another_program_trains_as_by_its_own_launcher(
    server: RankServer, tmp_path: Path, module: str, name: str, words: str
) -> None:
    kind, said = run(server, tmp_path, module, name)
    assert kind == "even"
    assert words in said
    check_lines(said)


def check_lines(said: str) -> None:
    """Check that the program's line in a message makes the call that the message names."""
    for call, file, number in re.findall(r"by (\w+) \((run_\w+\.py):(\d+)\)", said):
        lines = (SUPPORT / file).read_text().splitlines()
        assert f".{call}(" in lines[int(number) - 1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("other", "labels ignored later"),
        ("other", "batches left out"),
        ("unlike", "averaged by rows"),
    ],
)
def test_a_program_that_learns_something_else_is_warned(
    server: RankServer, tmp_path: Path, module: str, name: str
) -> None:
    assert run(server, tmp_path, module, name)[0] == "warned"


@pytest.mark.parametrize("name", ["rate by rows seen", "steps by rows seen"])
def test_a_rate_that_goes_by_the_rows_of_a_rank_ends_the_program(
    server: RankServer, tmp_path: Path, name: str
) -> None:
    kind, words = run(server, tmp_path, "unlike", name)
    assert kind == "ended"
    assert "its ranks step at different rates" in words


@pytest.mark.parametrize("name", ["another model between steps", "another model within a step"])
def test_an_uneven_epoch_that_another_model_interrupts_ends_the_program(
    server: RankServer, tmp_path: Path, name: str
) -> None:
    """The epoch's batches are divided by shares, but gradients would be averaged evenly."""
    kind, words = run(server, tmp_path, "unlike", name)
    assert kind == "ended"
    assert "has begun to train another model" in words


@pytest.mark.parametrize(
    ("name", "call"),
    [("rows added up later", "all_reduce"), ("rows gathered into parts later", "gather")],
)
def test_rows_that_are_exchanged_once_shares_are_uneven_end_the_program(
    server: RankServer, tmp_path: Path, name: str, call: str
) -> None:
    """Every rank exits with a message; the process group itself would abort the process."""
    kind, words = run(server, tmp_path, "exchanged", name)
    assert kind == "ended"
    assert f"different sizes to exchange by {call} (run_exchanged.py:" in words
    check_lines(words)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text())[1] for rank in (0, 1)]
    assert all(each["broke"] == ranks[0]["broke"] for each in ranks)


def test_nothing_is_imported_for_hooks_until_a_library_is() -> None:
    """Every Python process of a program has the hooks, even one that only lists a folder."""
    asks = (
        "from evener.program.install import install; install(); import sys; "
        "print(*{'wrapt', 'torch'} & {*sys.modules})"
    )
    environment = {
        **os.environ,
        "EVENER_PROGRAM": "{}",
        "EVENER_DEVICE": "cpu-0-of-2",
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(
        [sys.executable, "-c", asks], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (ended.stdout.split(), ended.stderr) == ([], "")


def test_a_row_is_fetched_twice_without_drawing_from_the_programs_numbers() -> None:
    """The copy has its own generators, also in the data sets that it consists of."""
    import numpy
    import torch
    from torch.utils.data import ConcatDataset, Dataset, Subset

    from evener.torch.audit.rows import copy_dataset

    class Noisy(Dataset[float]):
        def __init__(self) -> None:
            self.numbers = numpy.random.default_rng(0)
            self.more = torch.Generator().manual_seed(0)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> float:
            return float(self.numbers.random() + torch.rand((), generator=self.more))

    given, untouched = Noisy(), Noisy()
    twin = copy_dataset(ConcatDataset([Subset(given, [0, 1])]))
    assert [twin[0], twin[1]] == [untouched[0], untouched[1]]
    assert given[0] == Noisy()[0]


def test_ranks_are_compared_by_what_should_be_equal() -> None:
    import msgspec

    from evener.program.views import RankView, find_difference

    one = RankView("", (1, 2), 3, (1.0, float("inf"), float("nan")), (1 / 3,))
    other = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=RankView)
    changes: list[tuple[dict[str, object], str]] = [
        ({}, ""),
        ({"uses": (1 / 3 + 1e-7,)}, ""),  # like the rounding of different GPUs
        ({"uses": (1 / 3, 2.0)}, ""),  # a rank that also logs something
        ({"uses": (0.5,)}, "numbers"),
        ({"numbers": (1.0,)}, "numbers"),
        ({"numbers": (1.0,), "rates": 4}, "rates"),
        ({"rates": 4, "order": (1, 3)}, "order"),
        ({"numbers": None, "uses": ()}, ""),  # the guard hasn't checked
    ]
    for change, name in changes:
        assert find_difference([one, msgspec.structs.replace(other, **change)]) == name


@pytest.mark.parametrize("name", ["a trainer", "a module"])
def test_a_trainer_whose_loss_changes_later_goes_even(
    server: RankServer, tmp_path: Path, name: str
) -> None:
    skip_without("transformers", "lightning")
    kind, words = run(server, tmp_path, "trainers", name)
    assert kind == "warned"
    assert "DataLoader" not in words  # by the trainer's own hooks


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a trainer that gathers", CANT.partition("(")[0]),
        ("a module that gathers", USES_COLLECTIVES),
        ("a trainer whose ranks weigh otherwise", CAUSES["state"].why),
        ("a module with the ranks' last loss", "its ranks exchange values by all_reduce"),
        ("a trainer of rows split on each rank", DIFFERENCES["row"]),
        ("a module of rows split on each rank", DIFFERENCES["row"]),
    ],
)
def test_a_trainer_whose_loss_depends_on_other_ranks_stays_even(
    server: RankServer, tmp_path: Path, name: str, why: str
) -> None:
    """From its first step on, the weights are those under the program's own launcher.

    An audit of a Trainer's loss sees one rank, so a list for two ranks is an error in it.
    """
    skip_without("transformers", "lightning")
    kind, words = run(server, tmp_path, "trainers", name)
    assert kind == "even"
    assert words.startswith(why)
