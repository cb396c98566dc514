"""A request's way through the files, from `evener balance` to its Session: `python -m tests.support.walk [DEVICES]`.

A stop is a file in which functions run that had not run before; a return is a stop in a file that had been left.
Functions that run while a module is imported have no request yet, and comprehensions belong to their function.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from types import CodeType, FrameType

from evener.balancer.session import Session
from evener.tui.cli.main import run

from .sources import PACKAGES, REPO

INNER = {"<module>", "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}


class Arrived(BaseException):
    """The session has been made."""


class Walk:
    """Profiles this thread until `Session.__init__` returns; `stops` has a file and its functions for each stop."""

    def __init__(self) -> None:
        self.stops: list[tuple[str, list[str]]] = []
        self._known: set[CodeType] = set()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function, as sys.setprofile calls it."""
        code = frame.f_code
        if event == "return" and code is Session.__init__.__code__:
            sys.setprofile(None)
            raise Arrived
        if event != "call" or code in self._known:
            return
        self._known.add(code)
        file = os.path.relpath(os.path.realpath(code.co_filename), REPO)
        if file.split(os.sep)[0] not in PACKAGES or code.co_name in INNER or not code.co_flags & 2 or _imports(frame):
            return  # 2, CO_NEWLOCALS: the bodies of classes haven't it
        if not self.stops or self.stops[-1][0] != file:
            self.stops.append((file, []))
        self.stops[-1][1].append(code.co_qualname)

    def returns(self) -> int:
        """The number of stops in a file that had been left."""
        return len(self.stops) - len({file for file, _ in self.stops})


def _imports(frame: FrameType | None) -> bool:
    """True if a module is being imported above this frame."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def main(devices: str = "sim:gtx1080ti,gtx1080") -> None:
    """Print each stop, `<-` before a return, and the number of returns last."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        sys.setprofile(walk.see)
        with suppress(Arrived):
            run(["balance", "--devices", devices, "--json"])
    been = set[str]()
    for file, functions in walk.stops:
        print("<-" if file in been else "  ", file, *functions)
        been.add(file)
    print(walk.returns())


if __name__ == "__main__":
    main(*sys.argv[1:])
