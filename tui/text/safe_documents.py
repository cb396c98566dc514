"""JSON and TOML for printing: their meaning is unchanged, and no character in them can control a terminal.

Encoders escape ASCII control characters only, not those beyond ASCII or those that reverse the direction of text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable

import msgspec

from evener.plan.file import as_unicode

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def json_text(data: object) -> str:
    """`data` as one line of JSON; undecodable bytes of file names become question marks."""
    try:
        text = msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(as_unicode(msgspec.to_builtins(data))).decode()
    return harmless_json(text.encode())


def harmless_json(document: bytes) -> str:
    """A JSON document that is safe to print."""
    return _harmless(document.decode(), lambda sign: json.dumps(sign)[1:-1])


def toml_text(document: bytes) -> str:
    """A TOML document that is safe to print; its strings are basic ones, which allow escapes."""
    return _harmless(document.decode(), lambda sign: f"\\U{ord(sign):08x}")


def _harmless(text: str, escape: Callable[[str], str]) -> str:
    """The text with every non-ASCII control character escaped."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(escape(sign) if sign > "\x7e" and unicodedata.category(sign) in _UNSAFE else sign for sign in text)
