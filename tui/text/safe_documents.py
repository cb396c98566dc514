"""JSON and TOML as they are printed: no sign in them can steer a terminal, and they still say the same.

Encoders escape the ASCII control characters; those above ASCII, and signs that turn the direction of text, they let
through.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable

import msgspec

_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def json_text(data: object) -> str:
    """`data` as one line of JSON; the bytes of a file name that are no text become question marks."""
    try:
        text = msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(_as_unicode(msgspec.to_builtins(data))).decode()
    return harmless_json(text.encode())


def harmless_json(document: bytes) -> str:
    """A JSON document as it may be shown."""
    return _harmless(document.decode(), lambda sign: json.dumps(sign)[1:-1])


def toml_text(document: bytes) -> str:
    """A TOML document as it may be shown; its strings are basic ones, in which escapes count."""
    return _harmless(document.decode(), lambda sign: f"\\U{ord(sign):08x}")


def _harmless(text: str, escape: Callable[[str], str]) -> str:
    """The text with every sign beyond ASCII that could steer a terminal escaped; line ends stay."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(escape(sign) if sign > "\x7e" and unicodedata.category(sign) in _STEERING else sign for sign in text)


def _as_unicode(data: object) -> object:
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {_as_unicode(key): _as_unicode(item) for key, item in data.items()}
    return [_as_unicode(item) for item in data] if isinstance(data, list | tuple) else data
