"""Installs evener's hooks when Python starts, then imports the user's own `sitecustomize`."""

import sys
from importlib import import_module
from pathlib import Path

_own = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != _own]
try:
    install = import_module(
        "evener.program.install"
    ).install  # imported by name, because this file belongs to no package
except ImportError as error:
    sys.stderr.write(
        f"evener: its program isn't balanced: install evener for {sys.executable} ({error}).\n"
    )
else:
    install()
_this = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401 - of the user, where there is one
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    if _this is not None:
        sys.modules["sitecustomize"] = _this
