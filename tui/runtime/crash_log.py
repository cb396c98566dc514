"""Where a crash leaves its traceback."""

from __future__ import annotations

import os
import platform
import tempfile
import time
import traceback
from pathlib import Path


def write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback to a file of its own and return its path; None where nothing can be written."""
    import platformdirs

    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"evener on Python {platform.python_version()}, {platform.platform()}\n\n"
    text += "".join(traceback.format_exception(error))
    for folder in (Path(platformdirs.user_state_dir("evener")) / "crashes", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / name
            # a new file for its user alone: a name in a folder of everybody's may be a link that somebody laid there
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
                stream.write(text)
        except OSError:
            continue
        return path
    return None
