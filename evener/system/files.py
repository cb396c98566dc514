"""Files and folders in which evener keeps its state.

No state is kept in a folder that other users may write to. If an atomic write fails, the previous
file stays intact.
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
    """Return evener's state folder, and create it if necessary.

    Raises RequestError if the folder can't be used or others may write to it.
    """
    import platformdirs

    return trusted_folder(Path(platformdirs.user_state_path("evener")))


def runs_folder() -> Path:
    """Return the folder of all runs, and create it if necessary.

    Raises RequestError as `state_folder` does.
    """
    return trusted_folder(state_folder() / "runs")


def new_run_id() -> str:
    """Return a new name for a run, which begins with the UTC time."""
    # with a resolution of a quarter of a millisecond; the last digit is random
    now = time.time()
    from secrets import token_hex  # this import loads hashlib, which monitors don't need

    second = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{second}-{int(now % 1 * 4096):03x}{token_hex(1)[0]}"


def trusted_folder(folder: Path) -> Path:
    """Create a folder if necessary and return it, checked to be writable by this user alone.

    Raises RequestError if it can't be used, or if others own it or may write to it. Links are
    followed.
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
    """Create a folder and its missing parents, accessible to this user alone.

    An existing folder isn't changed.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def new_error_file() -> Path:
    """Return the path for error details, after deleting the previous file."""
    path = error_file()
    path.unlink(missing_ok=True)
    return path


def error_file() -> Path:
    """Return the path for error details."""
    return state_folder() / "errors.txt"


LARGEST_BYTES = 4 << 20  # size limit of a file that is read
PIPE_SECONDS = 5.0  # timeout for the first byte from a pipe


def read_whole(
    path: str | os.PathLike[str], what: str, remedy: str, error: type[RequestError] = RequestError
) -> bytes:
    """Read a file of at most 4 MiB, or a pipe that is written to within five seconds.

    `what` names the file's purpose in messages. Raises `error`, with `remedy`, if reading fails.
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
    """Write a file so that readers see either the old or the new content.

    Keeps the permissions of an existing file, and follows links. Raises RequestError if writing
    fails. A pipe or a device such as /dev/stdout is written to directly.
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
