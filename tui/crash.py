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
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            path.write_text(text)
        except OSError:
            continue
        return path
    return None
