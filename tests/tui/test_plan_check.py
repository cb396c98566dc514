"""A script that evener launch starts, and that never reads its plan, doesn't train N times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.errors import RequestError
from evener.plan.use import describe_unused
from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.frameworks import skip_without
from tests.support.launched_plan import plan
from tests.support.python_path import python_path
from tests.support.rank_server import RankServer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
PLAIN = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open(f"{sys.argv[1]}/{step}", "w").close()
"""
# a script that trains in a child process, which reads the plan
BY_A_CHILD = """
import subprocess, sys
subprocess.run(
    [sys.executable, "-c", "import os, evener; evener.load_plan(os.environ['EVENER_PLAN'])"],
    check=True,
)
"""
KERAS = """
import sys, keras, numpy
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(numpy.zeros((8, 2)), numpy.zeros((8, 1)), verbose=0)
open(f"{sys.argv[1]}/trained", "w").close()
"""


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a plan of one slice. It gets the folder `steps`."""
    (folder / "steps").mkdir()
    (folder / "train.py").write_text(script)
    plan(["cpu-0-of-1"]).save(folder / "plan.toml")
    words = [sys.executable, "-m", "evener", "launch", *options, "plan.toml", "train.py", "steps"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


@two_cores
@pytest.mark.slow
def test_a_script_that_ignores_the_plan_ends_in_its_first_steps(
    tmp_path: Path, rank_server: Callable[[str], RankServer]
) -> None:
    """Neither of two ranks continues. The lines to add are printed once, as an error."""
    skip_without("torch")
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "steps").mkdir()
    plan(["cpu-0-of-2", "cpu-1-of-2"]).save(tmp_path / "plan.toml")
    server, variables = rank_server("tests.support.torch_imports"), {"OMP_NUM_THREADS": "1"}
    words = "launch", "plan.toml", "train.py", str(tmp_path / "steps")
    evener = ForkedEvener(
        server, tmp_path, tmp_path / "evener", words, {**variables, "PYTHONPATH": python_path(ROOT)}
    )
    output, errors = evener.communicate(SECONDS)
    assert evener.returncode == 1
    assert len(list((tmp_path / "steps").iterdir())) < 10
    said = output + errors
    assert said.count("no process has read the plan") == 1
    assert "from evener.torch import Split" in said
    assert "evener run -- python" in said
    assert "has ended, after" not in said


@pytest.mark.slow
def test_a_plain_script_trains_where_the_check_is_off(tmp_path: Path) -> None:
    skip_without("torch")
    done = launch(tmp_path, PLAIN, "--no-plan-check")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "steps").iterdir())) == 100


@pytest.mark.slow
def test_a_keras_script_that_ignores_the_plan_ends_before_it_trains(
    tmp_path: Path, keras_ranks: Callable[..., list[Any]]
) -> None:
    """It runs as a process of a launch; the test above covers the launcher's part."""
    skip_without("tensorflow")
    (tmp_path / "train.py").write_text(KERAS)
    run = "tests.support.script_ranks.run_keras_without_plan"
    ((code, said),) = keras_ranks(run, str(tmp_path))
    assert code == RequestError.exit_code
    assert not (tmp_path / "trained").exists()
    assert "from evener.keras import Split" in said


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        ("print('nothing')", (), 2),
        ("print('nothing')", ("--no-plan-check",), 0),
        (BY_A_CHILD, (), 0),
        ("raise SystemExit(3)", (), 1),
    ],
)
def test_a_script_without_steps_is_judged_at_its_end(
    script: str, options: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """Any process of the training may read the plan. A script that fails has its own error."""
    done = launch(tmp_path, script, *options)
    assert (done.returncode, "no process has read the plan" in done.stderr) == (code, code == 2)


@pytest.mark.parametrize(
    ("imported", "line"),
    [
        ({"torch"}, "evener.torch"),
        ({"torch", "transformers"}, "with_plan"),
        ({"torch", "trl"}, "with_plan"),
        ({"torch", "pytorch_lightning"}, "split.strategy()"),
        ({"tensorflow"}, "split.build"),
        (set(), "split.wrap"),
    ],
)
def test_the_lines_to_add_are_those_of_the_library(imported: set[str], line: str) -> None:
    assert line in describe_unused(imported, program=False)
