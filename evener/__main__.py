"""The command line: `evener` and `python -m evener`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in `sys.argv`, and exit with its exit code, or 130 after Ctrl-C.

    `evener --version` is fast, because it imports nothing else.
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
