"""Another program on a GPU, or on the CPU where somebody tries a benchmark: it multiplies matrices
whenever it is let.

It is a process of its own, as two programs of two users are, and is stopped and let go on by
signals.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import TracebackType

PRODUCTS = """
import ctypes, os, signal, sys, torch
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with whom it disturbs
device = torch.device(sys.argv[1])
size, kind = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
torch.set_num_threads(1)
a = torch.randn(size, size, device=device, dtype=kind)
float((a @ a)[0, 0])
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    for _ in range(20):
        b = a @ a
    float(b[0, 0])
"""


class Neighbour:
    """Use it as a context; it begins stopped, and ready."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> Neighbour:
        command = [sys.executable, "-c", PRODUCTS, self._device]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._child.stdout is not None
        if not self._child.stdout.readline():
            raise RuntimeError("The neighbour didn't start.")
        return self

    def work(self, works: bool) -> None:
        """Begin, or stop; within some 30 ms."""
        self._child.send_signal(signal.SIGCONT if works else signal.SIGSTOP)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._child.kill()
        self._child.wait()
