"""Lists the files that a request passes through: `python -m tests.support.walk [balance [DEVICES] |
split]`.

`balance` goes from `evener balance` to its Session; `split` goes from Split to its first weighted
gradient, on two ranks. A stop is a file with functions that run for the first time; a return is a
stop in a file that was left before. Functions that run while a module is imported don't count, and
comprehensions belong to their function. What PyTorch calls back, in a forward or backward pass or
to fetch rows, is listed separately.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

from evener.balancer.session import Session
from evener.tui.cli.main import run

from .sources import PACKAGES, REPO

INNER = {"<module>", "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}


class Arrived(BaseException):
    """The session has been created."""


class Walk:
    """Profiles this thread until `Session.__init__` returns.

    `stops` has a file and its functions for each stop; `hooks` has the functions that PyTorch
    called and those that they called.
    """

    def __init__(self) -> None:
        self.stops: list[tuple[str, list[str]]] = []
        self.hooks: list[str] = []
        self._known: set[CodeType] = set()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Handle an event; a profile function for sys.setprofile."""
        code = frame.f_code
        if event == "return" and code is Session.__init__.__code__:
            sys.setprofile(None)
            raise Arrived
        if event != "call" or code in self._known:
            return
        self._known.add(code)
        file = os.path.relpath(os.path.realpath(code.co_filename), REPO)
        if (
            file.split(os.sep)[0] not in PACKAGES
            or code.co_name in INNER
            or not code.co_flags & 2
            or _imports(frame)
        ):
            return  # 2 is CO_NEWLOCALS, which class bodies don't have
        if _is_called_back(frame):
            self.hooks.append(f"{file} {code.co_qualname}")
            return
        if not self.stops or self.stops[-1][0] != file:
            self.stops.append((file, []))
        self.stops[-1][1].append(code.co_qualname)

    def returns(self) -> int:
        """The number of stops in a file that was left before."""
        return len(self.stops) - len({file for file, _ in self.stops})


def _is_called_back(frame: FrameType | None) -> bool:
    """True if a function of PyTorch is among the callers of this frame."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def _imports(frame: FrameType | None) -> bool:
    """True if the frame runs while a module is imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def walk_balance(walk: Walk, devices: str = "sim:gtx1080ti,gtx1080") -> None:
    """Follow `evener balance` to its Session."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        sys.setprofile(walk.see)
        with suppress(Arrived):
            run(["balance", "--devices", devices, "--json"])


def walk_split(walk: Walk) -> None:
    """Follow Split to the end of the first backward pass, as one of several ranks."""
    import torch

    from evener.torch import Split

    rows = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
    sys.setprofile(walk.see)
    split = Split(ratios=[3, 1], global_batch=8)
    model = split.wrap(torch.nn.Linear(4, 1))
    for inputs, targets in split.loader(rows):
        (model(inputs) - targets).square().mean().backward()
        sys.setprofile(None)
    split.close()


def save_split(folder: Path, rank: int) -> None:
    """Save the report of `walk_split`, as a rank of a RankServer."""
    import torch

    walk_split(walk := Walk())
    torch.save(report(walk), folder / f"{rank}.pt")


def start_split(walk: Walk) -> None:
    """Run `walk_split` on two ranks, of which the second is a separate process."""
    from .torch_start import free_port, rank_environment

    if "RANK" in os.environ:
        walk_split(walk)
        return
    ranks = {**rank_environment(), "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.support.walk", "split"]
    other = subprocess.Popen(
        command, env={**os.environ, **ranks, "RANK": "1"}, stdout=subprocess.DEVNULL
    )
    os.environ.update(ranks, RANK="0")
    walk_split(walk)
    assert other.wait() == 0


def report(walk: Walk) -> str:
    """Return each stop with `<-` before a return, then callbacks, and the number of returns."""
    been, lines = set[str](), []
    for file, functions in walk.stops:
        lines.append(" ".join(["<-" if file in been else "  ", file, *functions]))
        been.add(file)
    return "\n".join(
        [*lines, *(f"called back: {each}" for each in walk.hooks), str(walk.returns())]
    )


def main(way: str = "balance", *words: str) -> None:
    """Print the report for a request."""
    walk = Walk()
    {"balance": walk_balance, "split": start_split}[way](walk, *words)
    print(report(walk))


if __name__ == "__main__":
    main(*sys.argv[1:])
