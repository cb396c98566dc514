"""The files and folders in which evener keeps its state.

Folders that other users may write to aren't used. If an atomic write fails, the previous file stays
as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from pathlib import Path

from ..errors import RequestError, as_request_error


def state_folder() -> Path:
    """Return the folder in which evener keeps its state. It is created if necessary.

    Raises RequestError if the folder can't be used or other users may write to it.
    """
    import platformdirs

    return trusted_folder(Path(platformdirs.user_state_path("evener")))


def runs_folder() -> Path:
    """Return the folder that contains all runs. It is created if necessary.

    Raises RequestError if the folder can't be used or other users may write to it.
    """
    return trusted_folder(state_folder() / "runs")


def new_run_id() -> str:
    """Return the name for a new run. It begins with the time in UTC."""
    # the resolution is a quarter of a millisecond, and the last digit is random
    now = time.time()
    from secrets import token_hex  # this import loads hashlib, which monitors don't need

    second = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{second}-{int(now % 1 * 4096):03x}{token_hex(1)[0]}"


def trusted_folder(folder: Path) -> Path:
    """Return a folder after checking that only this user may write to it.

    It is created if necessary. Links are followed. Raises RequestError if the folder can't be used,
    belongs to another user or may be written to by others.
    """
    with as_request_error(
        f"The folder {folder} can't be used", "Set XDG_STATE_HOME to a folder that you may write."
    ):
        make_private(folder)
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RequestError(
            f"{folder} belongs to somebody else, and is not trusted.",
            "Set XDG_STATE_HOME to a folder of your own.",
        )
    if status.st_mode & 0o022:
        raise RequestError(
            f"{folder} may be written by others, and is not trusted.",
            f"If all in it is yours: chmod 700 {folder}. Or set XDG_STATE_HOME to another folder.",
        )
    return folder


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents so that only this user can access them.

    An existing folder isn't changed.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def new_error_file() -> Path:
    """Return the path of the file for details of errors, after deleting the existing file."""
    path = error_file()
    path.unlink(missing_ok=True)
    return path


def error_file() -> Path:
    """Return the path of the file for details of errors."""
    return state_folder() / "errors.txt"


LARGEST_BYTES = 4 << 20  # size limit of a file that is read
PIPE_SECONDS = 5.0  # timeout for the first byte from a pipe


def read_whole(
    path: str | os.PathLike[str], what: str, remedy: str, error: type[RequestError] = RequestError
) -> bytes:
    """Read a whole file of at most 4 MiB.

    The file may be a pipe, if data arrive within five seconds. `what` says what the file should be,
    such as "plan", for error messages. If the file can't be read, an error of class `error` is
    raised, which suggests `remedy` to the user.
    """
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
    """Write a file so that its readers see either the old or the new content.

    The permissions of an existing file are kept, and links are followed. A pipe or a device such as
    /dev/stdout is written to directly. Raises RequestError if writing fails.
    """
    with as_request_error(
        f"{path} can't be written", "Name a file in a folder that you may write to."
    ):
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
