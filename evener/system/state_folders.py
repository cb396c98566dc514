"""The folders of this user's runs and locks; nothing is read from a folder that somebody else may write."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from ..errors import RequestError, as_request_error


def state_folder() -> Path:
    """This user's state folder (XDG_STATE_HOME is honoured), made for this user alone if it isn't there."""
    import platformdirs

    return trusted_folder(Path(platformdirs.user_state_path("evener")))


def runs_folder() -> Path:
    """The folder that has a folder for each run."""
    return trusted_folder(state_folder() / "runs")


def new_run_id() -> str:
    """The name of a run's folder; it sorts by time, to a quarter of a millisecond, and its last digit is random."""
    now = time.time()
    from secrets import token_hex  # loads hashlib, which monitors do without

    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 4096):03x}{token_hex(1)[0]}"


def trusted_folder(folder: Path) -> Path:
    """The folder, made for this user alone; RequestError if, links followed, somebody else owns it or may write it."""
    with as_request_error(f"The folder {folder} can't be used", "Set XDG_STATE_HOME to a folder that you may write."):
        make_private(folder)
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RequestError(
            f"{folder} belongs to somebody else, and is not trusted.", "Set XDG_STATE_HOME to a folder of your own."
        )
    if status.st_mode & 0o022:
        raise RequestError(
            f"{folder} may be written by others, and is not trusted.",
            f"If all in it is yours: chmod 700 {folder}. Or set XDG_STATE_HOME to another folder.",
        )
    return folder


def make_private(folder: Path) -> None:
    """Make the folder, and those above it that aren't there, for this user alone, whatever the umask lets others do."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def new_error_file() -> Path:
    """A new, empty file of errors for the children of measurements without a run."""
    path = error_file()
    path.unlink(missing_ok=True)
    return path


def error_file() -> Path:
    """The file of errors that children of the last measurement without a run wrote."""
    return state_folder() / "errors.txt"
