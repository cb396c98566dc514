"""Writing a file in one step, so that a full disk, a kill or a missing permission leaves the old one intact."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from evener.errors import RequestError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step; a new file gets the umask's mode, an old one keeps its own.

    A link is followed; a pipe or a device such as /dev/stdout is written to. RequestError where that fails.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            target.write_bytes(content)
        else:
            _replace(target, content, mode)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path} can't be written: {getattr(error, 'strerror', None) or error}.",
            "Name a file in a folder that you may write to.",
        ) from None


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
