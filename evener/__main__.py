"""The entry point of `evener` and `python -m evener`.

It is the only module at the package's top level that imports `tui`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and exit with its exit code.

    `--version` alone is handled before any other import, so that it is fast.
    """
    if sys.argv[1:] == ["--version"]:
        from . import __version__

        print(f"evener {__version__}")
        return
    try:
        from evener.tui.cli.main import main as start

        code = start(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


if __name__ == "__main__":
    main()
