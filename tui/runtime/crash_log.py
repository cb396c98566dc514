"""The file that keeps a crash's traceback."""

from __future__ import annotations

import os
import platform
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from evener.system.state_folders import make_private


def write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback to a new file and return its path; None if no file can be written."""
    import platformdirs

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"evener on Python {platform.python_version()}, {platform.platform()}\n\n"
    text += "".join(traceback.format_exception(error))
    for folder in (Path(platformdirs.user_state_dir("evener")) / "crashes", Path(tempfile.gettempdir())):
        with suppress(OSError):
            make_private(folder)
            path = folder / name
            # new and private: in a shared folder, an existing name could be another user's link
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
                stream.write(text)
            return path
    return None
