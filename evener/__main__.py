"""`evener` and `python -m evener`: starts the command. The one module here that reaches up to `tui`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; `--version` alone answers before anything else is imported."""
    if sys.argv[1:] == ["--version"]:
        from evener import __version__

        print(f"evener {__version__}")
        return
    from tui.cli import run

    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
