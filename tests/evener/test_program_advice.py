"""The lines that make a script for one GPU train on several, in unlike scripts."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.frameworks import skip_without

skip_without("torch")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from evener.program import learners  # noqa: E402
from evener.program.advice import advise  # noqa: E402

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset

rows = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
"""
ITERATOR = """
batches = iter(rows)
while True:
    (batch,) = next(batches)
    said.append(advise(optimizer, rows))
    break
"""
OTHER_FUNCTIONS = """
def show():
    print(net.out_features)

def build():
    net = torch.nn.Linear(2, 2)
    print(net.kept)
"""
TWO_OPTIMIZERS = """
second = torch.optim.SGD(other.parameters())
for batch in rows:
    said.append(advise(optimizer, rows))
"""
LISTED = """
nets = [net, other]
for batch in rows:
    for each in nets:
        said.append(advise(optimizer, rows))
"""
WRAPPED = """
import types
train_rows = types.SimpleNamespace(loader=rows)
del rows
for batch in train_rows.loader:
    said.append(advise(optimizer, train_rows.loader))
"""


def list_lines(folder: Path, text: str) -> list[str]:
    """Run a script whose step asks for advice; return the lines of the first advice."""
    script, said = folder / "train.py", list[str]()
    script.write_text(text)
    runpy.run_path(str(script), {"advise": advise, "said": said})
    return [line.strip() for line in said[0].splitlines()]


@pytest.mark.parametrize(
    ("loop", "place"),
    [(ITERATOR, "batches = iter(rows)"), (TWO_OPTIMIZERS, "for batch in rows:")],
)
def test_lines_belong_before_the_rows_are_first_taken(
    tmp_path: Path, loop: str, place: str
) -> None:
    text = HEAD + loop
    number = text.splitlines().index(place) + 1
    first, *_ = list_lines(tmp_path, text)
    assert f"before line {number} of train.py" in first


def test_every_model_that_an_optimizer_trains_is_wrapped(tmp_path: Path) -> None:
    lines = list_lines(tmp_path, HEAD + TWO_OPTIMIZERS)
    for name in ("net", "other"):
        assert f"{name} = torch.nn.parallel.DistributedDataParallel({name})" in lines


def test_a_model_that_is_also_in_a_list_is_wrapped_there(tmp_path: Path) -> None:
    lines = list_lines(tmp_path, HEAD + LISTED)
    (wrapping,) = (line for line in lines if "Parallel" in line)
    assert wrapping.startswith("nets[0] = net = ")
    assert wrapping.endswith("(nets[0])")


def test_methods_that_a_wrapped_model_lacks_are_named_with_their_line(tmp_path: Path) -> None:
    """What runs before the model is wrapped stays as it is."""
    text = HEAD + "print(net.bias)\n" + OTHER_FUNCTIONS + TWO_OPTIMIZERS
    text += "print(net.in_features, net.weight, net.state_dict())\nprint(net.weight)\n"
    first, *_ = list_lines(tmp_path, text)
    line, shown = (
        len(text.splitlines()) - 1,
        text.splitlines().index("    print(net.out_features)") + 1,
    )
    used = f"net.module.in_features in line {line}, net.module.weight in lines {line}, {line + 1}"
    assert first.endswith(f", and write {used}, net.module.out_features in line {shown}:")


def test_a_loader_inside_of_a_librarys_loader_is_replaced_there(tmp_path: Path) -> None:
    """The loader of timm, for example, has PyTorch's loader in its attribute `loader`."""
    *_, last = list_lines(tmp_path, HEAD + WRAPPED)
    assert last.startswith("train_rows.loader = torch.utils.data.DataLoader(train_rows.loader.")


def test_the_loader_has_the_script_s_name_and_its_own_if_the_script_gave_none() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    unset = None
    batches = DataLoader(TensorDataset(torch.zeros(8, 2)), 4)
    assert "batches = torch.utils.data.DataLoader(batches.dataset" in advise(optimizer, batches)
    without = advise(optimizer, unset)
    assert "    loader = torch.utils.data.DataLoader(dataset, " in without
    assert "a DataLoader, so make a data set" in without


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_learner_that_trains_alone_gathers_nothing_and_gets_advice(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fastai gathers figures wherever WORLD_SIZE is set, which fails without a process group."""
    said: list[str] = []
    program = SimpleNamespace(is_single_rank=is_alone, report_single_device=said.append)
    monkeypatch.setattr(learners, "PROGRAM", program)

    def gather_or_fit(*given: Any, **_: Any) -> str:
        return f"{given} of all ranks"

    gathered = learners.gather(gather_or_fit, None, (1,), {})
    assert gathered == (1 if is_alone else "(1,) of all ranks")
    assert learners.fit(gather_or_fit, None, (2,), {}) == "(2,) of all ranks"
    assert [each.count("learn.distrib_ctx()") for each in said] == [1] * is_alone
