"""Faults as a person or a program reads them: one sentence and a remedy, or one JSON object."""

from __future__ import annotations

import sys

from evener.errors import EvenerError, RequestError
from evener.tui.text.formatting import plain
from evener.tui.text.safe_documents import json_text


def report_fault(fault: EvenerError, as_json: bool) -> int:
    """Say the fault on stderr (as JSON: on stdout) and return its exit code."""
    if as_json:
        error = {"kind": fault.kind, "message": fault.message, "remedy": fault.remedy}
        print(json_text({"error": error}), flush=True)
    else:
        print(f"evener: {plain(str(fault), 2000)}", file=sys.stderr, flush=True)
    return fault.exit_code


def usage_fault(error: Exception) -> EvenerError | None:
    """The fault in an argument parser's complaint, or None if it is something else.

    The parser's own exception classes are private to typer, so they are known by what they offer.
    """
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "evener"
    message = str(describe()).strip()
    return RequestError(message if message.endswith((".", "?")) else f"{message}.", f"See {command} --help.")
