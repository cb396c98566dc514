"""Small files that a person names, read whole; and files written in one step.

A full disk, a kill or a missing permission then leaves the old file intact.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from pathlib import Path

from ..errors import RequestError, as_request_error

LARGEST_BYTES = 4 << 20  # of a file to read
PIPE_SECONDS = 5.0  # that the writer of a pipe has to begin


def read_whole(path: str | os.PathLike[str], what: str, remedy: str, error: type[RequestError] = RequestError) -> bytes:
    """The bytes of a file, which should be a `what`; `error` if it can't be read, or is too large to be one."""
    with (
        as_request_error(f"The {what} {path} can't be read", remedy, error),
        os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream,
    ):
        if not select.select([stream], [], [], PIPE_SECONDS)[0]:
            raise error(f"Nothing is written to the pipe {path}, which should be a {what}.", remedy)
        os.set_blocking(stream.fileno(), True)
        content = stream.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise error(f"{path} is larger than any {what}.", remedy)
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step; a new file gets the umask's mode, an old one keeps its own.

    A link is followed; a pipe or a device such as /dev/stdout is written to. RequestError where that fails.
    """
    with as_request_error(f"{path} can't be written", "Name a file in a folder that you may write to."):
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            target.write_bytes(content)
        else:
            _replace(target, content, mode)


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if mode is not None:
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
