"""Runs a user's script as a rank of a RankServer, which has already imported its framework."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from evener.errors import RequestError
from evener.plan.file import load_plan
from evener.plan.use import PLAN_USED
from evener.training import first_rank, launched


def run_script(_rank: int, script: str, *words: str) -> str:
    """Run `python script words` in the script's folder, and return its output.

    The scripts don't leave a process group of several gloo ranks while a model is alive, which may
    hang in PyTorch.
    """
    os.chdir(Path(script).parent)
    sys.argv = [script, *words]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def run_keras_in_float64(rank: int, script: str, *words: str) -> str:
    """Do the same as `run_script`, with float64 as Keras' default, for equal numbers on
    every CPU.
    """
    import keras

    from tests.support.keras_twice import trace_faster

    keras.config.set_floatx("float64")
    trace_faster()
    return run_script(rank, script, *words)


def run_keras_by_plan(rank: int, plan: str, script: str, *words: str) -> str:
    """Do the same as `run_script`, in the environment that evener launch sets for this rank."""
    from tests.support.keras_twice import trace_faster

    trace_faster()
    os.environ |= {launched.PLAN: plan, launched.DEVICE: load_plan(plan).layout.active[rank].device}
    return run_script(rank, script, *words)


def run_keras_without_plan(_rank: int, folder: str) -> list[Any]:
    """Return the exit code and output of train.py, run by evener launch, which checks that a plan
    is read.
    """
    from evener.program.install import install

    use_file = Path(folder, "use")
    use_file.touch()
    os.environ[PLAN_USED] = str(use_file)
    install()
    with redirect_stderr(io.StringIO()) as said:
        try:
            run_script(0, str(Path(folder, "train.py")), folder)
        except SystemExit as ended:
            return [ended.code, said.getvalue()]
    return [0, said.getvalue()]


def run_saving_script(folder: Path, rank: int, script: str) -> None:
    """Do the same as `run_script`, with the rank's folder as argument; the script saves `0.pt`,
    `1.pt`.

    The process group ends with the process: PyTorch may hang when a script destroys it while its
    DistributedDataParallel is alive.
    """
    import torch.distributed as dist

    dist.destroy_process_group = lambda *_: None
    run_script(rank, script, f"{folder}/")


def run_launched(_folder: Path, rank: int, script: str, *words: str) -> None:
    """Do the same as `run_script`, in the caller's environment and with one PyTorch thread."""
    import torch

    torch.set_num_threads(1)
    run_script(rank, script, *words)


def run_evener(folder: Path, _rank: int, cwd: str, *words: str) -> None:
    """Run `evener WORDS` in a folder; files get its output, process id and exit code.

    See forked_evener.py.
    """
    os.chdir(cwd)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    (folder / "pid").write_text(str(os.getpid()))
    sys.argv = ["evener", *words]
    code: object = 0
    try:
        runpy.run_module("evener", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    (folder / "code").write_text(str(code))


def run_by_shares(folder: Path, rank: int, plan: str, script: str, *words: str) -> None:
    """Do the same as `run_saving_script`, in the environment and with the hooks of evener run.

    It adds evener's messages as "said".
    """
    from evener.program.notes import ProgramSettings

    _run_hooked(ProgramSettings("", Path(script).name), folder, rank, plan, script, *words)


def run_by_last_shares(
    folder: Path, rank: int, plan: str, notes: str, script: str, model: str, rows: int
) -> None:
    """Do the same as `run_by_shares`, with shares that an earlier training left in `notes`.

    That one had this model and `rows` per step. The rank's note is saved to `notes`.
    """
    from evener.program.notes import ProgramSettings, SharesOrigin

    origin = SharesOrigin(model, rows)
    settings = ProgramSettings(notes, Path(script).name, origin=origin)
    _run_hooked(settings, folder, rank, plan, script)
    from evener.program.program import PROGRAM

    PROGRAM.notebook.leave()  # the process would do this at its exit, which a forked rank skips


def run_as_first_rank(folder: Path, rank: int, plan: str, script: str) -> None:
    """Do the same as `run_script`, as the first of evener's two ranks, for which the other waits.

    It saves the script's output and evener's messages.
    """
    import torch

    from evener.program.notes import ProgramSettings

    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {first_rank.RELEASE: str(folder / "release")}
    os.environ[first_rank.STARTED_AS] = first_rank.describe_rank()
    _install_hooks(ProgramSettings("", Path(script).name), rank, plan)
    printed = run_script(rank, script)
    said = (folder / f"rank{rank}.txt").read_text()
    torch.save({"printed": printed, "said": said}, folder / f"{rank}.pt")


def _install_hooks(settings: Any, rank: int, plan: str) -> None:
    from evener.program.install import install

    os.environ |= {launched.PROGRAM: msgspec.json.encode(settings).decode(), launched.PLAN: plan}
    os.environ[launched.DEVICE] = load_plan(plan).layout.active[rank].device
    install()


def _run_hooked(
    settings: Any, folder: Path, rank: int, plan: str, script: str, *words: str
) -> None:
    import torch

    _install_hooks(settings, rank, plan)
    run_script(rank, script, f"{folder}/", *words)
    saved = folder / f"{rank}.pt"
    torch.save(torch.load(saved) | {"said": (folder / f"rank{rank}.txt").read_text()}, saved)


def save_captured_trainer(folder: Path, rank: int, script: str) -> None:
    """Save the class and the step of a script's trainer, where the script would save `0.pt`."""
    import torch

    from evener.program.trainers import build

    os.environ[launched.PROGRAM_COMMAND] = json.dumps([script, f"{folder}/"])
    made = build()
    torch.save([type(made).__name__, made.state.global_step], folder / f"{rank}.pt")


def save_step_alone(folder: Path, rank: int, strict: bool) -> None:
    """Save what an optimizer step without a process group raises under evener run.

    The note that the first rank takes of it is saved, too.
    """
    import torch

    from evener.program.notes import ProgramSettings
    from evener.program.program import Program

    os.environ[launched.PROGRAM] = msgspec.json.encode(
        ProgramSettings("", "train.py", strict)
    ).decode()
    program, raised = Program(), ""
    try:
        program.note_update(torch.optim.SGD([torch.zeros(1)]))
    except RequestError as error:
        raised = str(error)
    torch.save([raised, program.notebook.why], folder / f"{rank}.pt")


def save_printed(folder: Path, rank: int, script: str, *words: str) -> None:
    """Do the same as `run_script`, with one PyTorch thread, and save the output."""
    import torch

    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    torch.set_num_threads(1)
    torch.save(run_script(rank, script, *words), folder / f"{rank}.pt")


def save_printed_beside_launched(
    folder: Path, rank: int, printed: str, script: str, *words: str
) -> None:
    """Do the same as `save_printed`, for a script that starts two ranks of itself by torchrun.

    The output of the first of them is already known: `printed`.
    """
    import torch.distributed.run

    def launch(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked = torch.distributed.run.parse_args(command[3:])
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert (asked.standalone, asked.nproc_per_node) == (True, "2")
        assert [asked.training_script, *asked.training_script_args] == [script, "--column", *words]
        return subprocess.CompletedProcess(command, 0, printed)

    with patch.object(subprocess, "run", launch):
        save_printed(folder, rank, script, *words)


def save_printed_by_plan(folder: Path, rank: int, plan: str, script: str, *words: str) -> None:
    """Do the same as `save_printed_in_float64`, in the environment of evener launch for
    this rank.
    """
    os.environ |= {launched.PLAN: plan, launched.DEVICE: load_plan(plan).layout.active[rank].device}
    save_printed_in_float64(folder, rank, script, *words)


def save_printed_in_float64(folder: Path, rank: int, script: str, *words: str) -> None:
    """Do the same as `save_printed`, with float64 as PyTorch's default, for equal numbers on every
    CPU.
    """
    import torch

    torch.set_default_dtype(torch.float64)
    save_printed(folder, rank, script, *words)
