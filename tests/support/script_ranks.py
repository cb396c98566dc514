"""Runs a user's script as a rank of a RankServer, which has imported PyTorch already."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch


def run_script(folder: Path, rank: int, script: str, words: Sequence[str]) -> None:
    """As `python script words` in the script's folder; leaves what it prints.

    A script that leaves the group of several gloo ranks while a model lives may hang in PyTorch: none of these does.
    """
    os.chdir(Path(script).parent)
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    torch.set_num_threads(1)
    sys.argv = [script, *words]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    torch.save(printed.getvalue(), folder / f"{rank}.pt")
