"""The output of this host's processes, where there are several: each line behind the name of its process."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product

STREAMS = (1, 2)  # standard output and error
LONGEST_LINE = 1 << 16
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")  # of lines, also a progress bar's


@contextmanager
def named_output(names: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """The files that each process opens as its standard output and error; after it, all that was written is out."""
    end = secrets.token_bytes(16)  # the pipes may stay open, in what the processes have started
    pipes = [(*os.pipe(), f"[{name}] ".encode(), stream) for name, stream in product(names, STREAMS)]
    threads = [threading.Thread(target=_copy, args=(read, end, *place), daemon=True) for read, _, *place in pipes]
    for thread in threads:
        thread.start()
    paths = [f"/proc/{os.getpid()}/fd/{write}" for _, write, *_ in pipes]
    try:
        yield tuple(zip(paths[::2], paths[1::2], strict=True))
    finally:
        for (_, write, *_), thread in zip(pipes, threads, strict=True):
            with suppress(OSError):
                os.write(write, end)
            thread.join()
            os.close(write)


def _copy(read: int, end: bytes, name: bytes, stream: int) -> None:
    """Copy until `end`, or until nobody takes what is written: then the process hears of it."""
    begun = found = b""
    with suppress(OSError), os.fdopen(read, "rb", 0) as pipe:
        while not found:
            text, found, _ = (begun + pipe.read(LONGEST_LINE)).partition(end)
            *lines, begun = _ENDS.split(text)
            if found or len(begun) > LONGEST_LINE:
                lines, begun = [*lines, begun and begun + b"\n" * bool(found)], b""
            for line in filter(None, lines):
                _write(stream, name + line)


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]
