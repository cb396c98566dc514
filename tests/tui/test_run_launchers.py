"""`evener run` with programs that start their processes themselves, and with scripts for
one GPU.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.frameworks import LazyModule, skip_without
from tests.support.launched_plan import UNEVEN
from tests.support.listeners import ListenerLog
from tests.support.rank_server import RankServer
from tests.support.waiting import wait_for
from tests.tui.test_run import PROGRAM, ROOT, difference, make_variables

torch = LazyModule("torch")
SPAWNING, FOR_ONE = (ROOT / f"tests/support/{name}_program.py" for name in ("spawning", "one_gpu"))
SECONDS = 240.0
Start = Callable[..., ForkedEvener]


@pytest.fixture
def start(tmp_path: Path, rank_server: Callable[[str], RankServer]) -> Start:
    """Return a function `start(*words)` that runs evener run with these words after its plan of
    3:1.
    """
    skip_without("torch")
    (tmp_path / "plan.toml").write_text(UNEVEN)
    server = rank_server("tests.support.torch_imports")

    def run(*words: str) -> ForkedEvener:
        given = ("run", "--plan", "plan.toml", "--", *words)
        return ForkedEvener(server, tmp_path, tmp_path / "evener", given, make_variables(tmp_path))

    return run


def free_port() -> str:
    """Return a port on which nobody listens."""
    from tests.support.torch_start import free_port

    return str(free_port())


TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--master-port")
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port")


@two_cores
@pytest.mark.slow
def test_a_launcher_s_own_processes_train_by_shares(
    start: Start, tmp_path: Path, trainer_ranks: Callable[..., list[Any]]
) -> None:
    """The number of processes stays the same, they learn the same, and nothing listens beyond this
    machine.
    """
    evenly = trainer_ranks("tests.support.script_ranks.run_saving_script", PROGRAM, world=2)
    evener = start(*TORCHRUN, free_port(), PROGRAM, f"{tmp_path}/")
    with ListenerLog(evener.pid) as log:
        _, errors = evener.communicate(SECONDS)
    assert not evener.returncode, errors
    first, second = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert first["rows"] == [4, *[6] * 5, 3, *[6] * 6, 3]
    assert second["rows"] == [4, *[2] * 5, 1, *[2] * 6, 1]
    assert difference(first["weights"], evenly[0]["weights"]) <= 1e-12
    assert errors.count("6+2 = 8 rows a step, with DistributedDataParallel and DataLoader") == 1
    assert "[rank" not in errors  # torchrun's own lines are unchanged
    assert {each.address for each in log.seen} == {"127.0.0.1"}


@two_cores
@pytest.mark.slow
def test_processes_that_a_program_starts_train_by_shares(start: Start, tmp_path: Path) -> None:
    evener = start("python", str(SPAWNING), free_port(), f"{tmp_path}/")
    _, errors = evener.communicate(SECONDS)
    assert not evener.returncode, errors
    first, second = [torch.load(tmp_path / str(rank)) for rank in (0, 1)]
    assert [first["rows"], second["rows"]] == [[4, *[6] * 7], [4, *[2] * 7]]
    assert first["weights"] == second["weights"]
    assert first["RANK"] is None  # as without evener
    assert errors.count("6+2 = 8 rows a step") == 1
    assert "shares: 6 on CPU:0" in errors


@two_cores
@pytest.mark.slow
def test_a_script_for_one_gpu_runs_once_and_its_lines_work(start: Start, tmp_path: Path) -> None:
    """The exit code is its own. With the lines that evener prints, it learns the same by shares."""
    log = tmp_path / "log"
    alone = start("python", str(FOR_ONE), str(log), "3")
    printed, errors = alone.communicate(SECONDS)
    assert alone.returncode == 3
    (learned,) = map(float, log.read_text().split())
    assert printed == "has trained\n"
    assert "it runs once, on its first device alone" in errors
    lines = [line for line in errors.splitlines() if line.startswith("    ")]
    (place,) = re.findall(r"add before line (\d+) of one_gpu_program.py", errors)

    source = FOR_ONE.read_text().splitlines()
    source[int(place) - 1 : int(place) - 1] = lines  # with the indentation of a function
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(source))
    (tmp_path / "evener/code").unlink()
    shared = start("python", str(script), str(log), "0")
    _, errors = shared.communicate(SECONDS)
    assert not shared.returncode, errors
    assert "6+2 = 8 rows a step" in errors
    assert [float(each) for each in log.read_text().split()] == pytest.approx(
        [learned] * 3, abs=1e-12
    )


LIGHTNING_FOR_ONE = """
import sys
import lightning as L
import torch

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_checkpointing=False, **quiet).fit(
    Module(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=8)
)
print("has trained")
"""


@pytest.mark.slow
def test_a_lightning_trainer_for_one_device_gets_advice_for_all(
    tmp_path: Path, trainer_ranks: Callable[..., list[Any]]
) -> None:
    """The message has the options; that such a script runs once is tested above."""
    skip_without("lightning")
    script, plan = tmp_path / "one.py", tmp_path / "plan.toml"
    script.write_text(LIGHTNING_FOR_ONE)
    plan.write_text(UNEVEN)
    (alone,) = trainer_ranks(
        "tests.support.script_ranks.run_as_first_rank", str(plan), str(script), imports="lightning"
    )
    assert alone["printed"] == "has trained\n"
    assert "it runs once, on its first device alone" in alone["said"]
    assert 'devices=2, strategy="ddp"' in alone["said"]


@two_cores
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "is_killed"), [(ACCELERATE, False), (TORCHRUN, True)], ids=["ctrl-c", "killed"]
)
def test_nothing_that_a_launcher_has_started_is_left(
    start: Start, tmp_path: Path, launcher: tuple[str, ...], is_killed: bool
) -> None:
    """All ends at Ctrl-C with its exit code, and when a rank is killed with the launcher's.

    Ranks that another launcher starts have evener's hooks too.
    """
    skip_without("accelerate")
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "assert 'evener.program.install' in sys.modules\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(str(os.getpid()))"
        "\ntime.sleep(600)\n"
    )
    evener = start(*launcher, free_port(), str(script))
    files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "ranks", SECONDS)
    if is_killed:
        os.kill(int(files[1].read_text()), signal.SIGKILL)
    else:
        evener.send_signal(signal.SIGINT)
    evener.communicate(SECONDS)
    assert evener.returncode == (1 if is_killed else 130)
    processes = [Path("/proc", file.read_text()) for file in files]
    wait_for(lambda: not any(each.exists() for each in processes), "the ranks' end", SECONDS)
