"""A person's words about a run: a note and tags, in a small file beside its journal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from evener.errors import RequestError
from evener.system.files import write_atomically

NOTE = "note.json"
LONGEST_NOTE = 1000
MOST_TAGS = 20
LARGEST_FILE_BYTES = 64 << 10
_TAG = re.compile(r"[\w.-]{1,40}")


class RunNote(msgspec.Struct, frozen=True):
    """Printable text in one line, and tags in alphabetical order."""

    note: Annotated[str, msgspec.Meta(max_length=LONGEST_NOTE)] = ""
    tags: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_TAGS)] = ()


def read_note(folder: Path) -> RunNote:
    """The note in a run's folder; an empty one if there is none, or it can't be read."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        with os.fdopen(os.open(folder / NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            found = msgspec.json.decode(stream.read(LARGEST_FILE_BYTES), type=RunNote)
        return RunNote(_clean(found.note), tuple(tag for tag in found.tags if _TAG.fullmatch(tag)))
    return RunNote()


def change_note(folder: Path, note: str | None, add_tags: Iterable[str], remove_tags: Iterable[str]) -> RunNote:
    """Write the changed note and return it; `note` None leaves the text as it is. RequestError for a bad tag."""
    before, added = read_note(folder), tuple(add_tags)
    for tag in added:
        if not _TAG.fullmatch(tag):
            raise RequestError(
                f"{tag!r} can't be a tag.", "Use up to 40 letters, digits, dots, dashes and underscores."
            )
    text = before.note if note is None else _clean(note)
    tags = sorted({*before.tags, *added} - set(remove_tags))
    if len(text) > LONGEST_NOTE or len(tags) > MOST_TAGS:
        raise RequestError(
            f"A note has at most {LONGEST_NOTE} characters, and a run at most {MOST_TAGS} tags.", "Write less."
        )
    found = RunNote(text, tuple(tags))
    write_atomically(folder / NOTE, msgspec.json.encode(found))
    return found


def _clean(text: str) -> str:
    """The text in one line, without control characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
