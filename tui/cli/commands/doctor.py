"""`evener doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import sys

from evener.balancer.diagnostics import Check, Level, check_machine
from evener.tui.text.formatting import plain
from evener.tui.text.safe_documents import json_text

_MARKS: dict[Level, str] = {"ok": "ok  ", "note": "note", "problem": "FAIL"}


def run_doctor(as_json: bool) -> int:
    """Print every check; returns 0: all well, 1: notes, 2: balance can't run here."""
    checks = check_machine()
    code = exit_code(checks)
    if as_json:
        print(json_text({"exit_code": code, "checks": checks}))
        return code
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{_MARKS[check.level]}  {check.name:<{width}}  {plain(check.found)}")
        if check.remedy:
            print(
                f"{'':{width + 6}}  → {plain(check.remedy)}" if sys.stdout.isatty() else f"      {plain(check.remedy)}"
            )
    return code


def exit_code(checks: tuple[Check, ...]) -> int:
    """The code of the worst check: 0 ok, 1 note, 2 problem."""
    order: tuple[Level, ...] = ("ok", "note", "problem")
    return max(order.index(check.level) for check in checks)
