"""The user's own workload raises or hangs: the message names file and line, and nothing is left."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from evener.balancer.events import Event, ProbeProgress
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.errors import EvenerError, NoLayoutError, RequestError
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without
from tests.support.probe_children import list_probe_children

pytestmark = [pytest.mark.slow, two_cores]

BUILD = """
def build():
    import torch
    model = torch.nn.Linear(4, 2)
    {extra}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()

def sample_batch(n):
    import torch
    {batch}
    return torch.zeros(n, 4), torch.zeros(n, 2)
"""


@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(
    ("extra", "batch", "words"),
    [
        ("raise ValueError('no such dataset')", "pass", "train.py:5: ValueError: no such dataset"),
        ("pass", "raise KeyError('labels')", "train.py:10: KeyError: 'labels'"),
    ],
)
def test_the_line_that_raised_is_named_in_one_line(
    tmp_path: Path, extra: str, batch: str, words: str
) -> None:
    """The line is named while the model or a batch is built.

    tests/workloads/test_keras_workloads has the same for Keras models.
    """
    skip_without("torch")
    source = tmp_path / "train.py"
    source.write_text(BUILD.format(extra=extra, batch=batch))
    request = Request(
        devices="cpu/2:0", workload=f"{source}:build", framework="torch", budget_seconds=30.0
    )
    session = Session(open_run(request))
    with pytest.raises(EvenerError) as fault:
        list(session.events())
    session.close()
    assert words in fault.value.message
    assert "\n" not in fault.value.message
    assert fault.value.remedy
    assert not list_probe_children()


NETWORK = """
import torch
from layers import Broken

def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), Broken())
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss()

def sample_batch(n):
    return torch.zeros(n, 4), torch.zeros(n, 2)
"""
LAYERS = """
import torch

class Broken(torch.nn.Module):
    def forward(self, x):
        return torch.reshape(x, (3, 5, 7))
"""


@pytest.mark.usefixtures("shared_servers")
def test_an_error_in_a_step_names_the_user_s_line_and_the_file_with_the_traceback(
    tmp_path: Path,
) -> None:
    """The line may be in any of the user's files; the traceback includes framework lines."""
    skip_without("torch")
    (tmp_path / "train.py").write_text(NETWORK)
    (tmp_path / "layers.py").write_text(LAYERS)
    request = Request(
        devices="cpu/2:0",
        workload=f"{tmp_path}/train.py:build",
        framework="torch",
        budget_seconds=30.0,
    )
    session = Session(open_run(request))
    with pytest.raises(EvenerError) as fault:
        list(session.events())
    session.close()
    path = runs.run_folder(session.run_id) / "errors.txt"
    message, errors = fault.value.message, path.read_text()
    assert str(path) in message
    assert f"{tmp_path}/layers.py:6: RuntimeError: shape '[3, 5, 7]' is invalid" in message
    assert "Traceback (most recent call last)" in errors
    assert "torch/nn/modules" in errors
    assert "layers.py" in errors


ONE_RAISES = """
import os
import time

def build():
    if 0 in os.sched_getaffinity(0):
        raise FileNotFoundError("no such data set")
    time.sleep(600)
"""


@pytest.mark.skipif(0 not in os.sched_getaffinity(0), reason="the first core raises")
@pytest.mark.parametrize("budget", [600.0, 0.5])
def test_a_mistake_ends_the_session_once_whatever_the_other_devices_do(
    tmp_path: Path, budget: float, request: pytest.FixtureRequest
) -> None:
    """The first device's failure ends the session without waiting for the other device.

    It is also reported if the time is over before the framework is imported.
    """
    skip_without("torch")
    if budget > 1:
        request.getfixturevalue("shared_servers")
    (tmp_path / "train.py").write_text(ONE_RAISES)
    asked = Request(
        devices="cpu/2",
        workload=f"{tmp_path}/train.py:build",
        framework="torch",
        budget_seconds=budget,
    )
    session = Session(open_run(asked))
    started = time.monotonic()
    with pytest.raises(
        NoLayoutError, match=r"train.py:7: FileNotFoundError: no such data set"
    ) as fault:
        list(session.events())
    session.close()
    assert time.monotonic() - started < 200
    assert fault.value.message.count("FileNotFoundError") == 1
    run = runs.load_run(session.run_id)
    assert len(run.record.observations) == 1
    assert (run.state, run.trouble) == ("failed", fault.value.message)
    with pytest.raises(
        RequestError, match=r"nothing was measured: CPU:0, building: .*FileNotFoundError"
    ):
        Session(open_run(asked, resume=session.run_id))
    assert not list_probe_children()


HANGS = """
import time

def build():
    while True:
        time.sleep(1)
"""


@pytest.mark.usefixtures("shared_servers")
def test_a_build_that_hangs_is_counted_from_the_start_and_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of each device are shown; the end names the function that hasn't returned.

    It gives the line and the duration. The end comes with the budget: only probes that make steps
    get more time.
    """
    skip_without("torch")
    monkeypatch.setattr("evener.balancer.session.GRACE_SHARE", 4.0)
    # a busy machine needs more than 2
    monkeypatch.setattr("evener.balancer.probes.children.STACK_SECONDS", 60.0)
    (tmp_path / "train.py").write_text(HANGS)
    request = Request(
        devices="cpu/2",
        workload=f"{tmp_path}/train.py:build",
        framework="torch",
        budget_seconds=7.0,
    )
    session = Session(open_run(request))
    reports: list[Event] = []
    with pytest.raises(NoLayoutError) as fault:
        reports.extend(session.events())
    session.close()
    found = re.search(
        r"train\.py's build\(\) had not returned after (\d+) s on CPU:0 and CPU:1, at (.*)",
        fault.value.message,
    )
    assert found, fault.value.message
    errors = runs.errors_path(session.run_id)
    assert found[2] == f"{tmp_path}/train.py:6 (stack in {errors})."
    assert f'File "{tmp_path}/train.py", line 6 in build' in errors.read_text()
    assert 1 <= int(found[1]) <= 60
    assert "--budget 14s" in fault.value.remedy
    building = [
        one for one in reports if isinstance(one, ProbeProgress) and one.phase == "building"
    ]
    for position in (0, 1):
        times = [one.phase_seconds for one in building if one.probe.layout.active == (position,)]
        assert times == sorted(times)
        assert times[-1] > times[0]
    assert runs.load_run(session.run_id).state == "failed"
