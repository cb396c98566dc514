"""Parses the terms of `--devices`, by this grammar and without access to any device.

    request = term ("," term)*
    term    = [where] device ["@" limit]    the limit applies to the device directly before it
    where   = "ray/"                        on every host of the Ray cluster; `ray` alone is
                                            `ray/auto`
            | "ray:" HOST "/"               on one host, by its address or name; `ray:HOST` is
                                            `ray:HOST/auto`
    device  = "auto"                        all GPUs or, if there are none, CPU slices; the only
                                            term for its host
            | "gpu" [":" pick]              all GPUs, or one; another maker's devices have a kind
                                            of their own
            | "cpu" ["/" COUNT] [":" pick]  all slices of the CPU cut into COUNT (default 2), or one
            | "sim:" NAME                   from the catalogue
            | "sim:" FILE                   a machine file: ends in .toml or contains a "/"; the
                                            only term
            | UUID                          GPU-... or MIG-...: a GPU, as in `gpu:UUID`
            | pick                          takes the kind of the term before it: `cpu:0,1`,
                                            `sim:t4,t4`
    pick    = INDEX | UUID or a unique prefix of one | NAME
    limit   = part [ "+" part ]             at most one of each kind, in either order
    part    = NUMBER "%"                    a share of the device's compute: above 0, at most 100
            | NUMBER UNIT                   a part of its memory: B KiB MiB GiB TiB (powers of 1024)
                                            or KB MB GB TB

For example, `cpu:0,1@60%` limits only slice 1, and `cpu@60%` limits every slice.
`gpu:0,gpu:1@60%+8GiB` limits only the second GPU. `ray:a/gpu:0,2,ray:b` requests two GPUs of host a
and all GPUs of host b. All devices of a request must be of one kind: GPUs, CPU slices and simulated
devices can't train together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

import msgspec

from evener.errors import RequestError

from .registry import BACKENDS, all_backends
from .types import Limit, Term

REMEDY = (
    "Write auto, gpu, gpu:0,2, cpu, cpu/4, cpu:0,1@60%, ray, ray:HOST/gpu:0, "
    "sim:gtx1080ti,gtx1080 or sim:machine.toml."
)
NO_LIMIT = Limit()
EVERY_HOST = ""
_TERM = re.compile(r"(\w+)(?:/(\d{1,6}))?(:(.*))?", re.IGNORECASE | re.ASCII | re.DOTALL)
_WHERE = re.compile(r"ray(?::([^/]+))?(?:/(.+))?", re.IGNORECASE | re.DOTALL)
_LIMIT_WITHOUT_AT = re.compile(  # a machine file may have such a name
    r"(?!sim:.*(?:/|\.toml$))([^+\s]+)[+\s]+([\d.]+\s*(?:%|[kmgt]?i?b\b).*)",
    re.IGNORECASE | re.ASCII,
)


def parse_request(spec: str) -> tuple[Term, ...]:
    """Parse a request for devices, such as `gpu:0@60%,gpu:1`, into its terms.

    Terms are the comma-separated parts. Whether the devices exist isn't checked. Raises
    `RequestError` if the request is invalid, or if its devices can't train together, because they
    are of several kinds, or only some of them are in a Ray cluster.
    """
    terms: list[Term] = []
    for text in spec.split(","):
        terms.append(_parse_term(text.strip(), terms[-1] if terms else None, spec))
    _check_together(terms, spec)
    return tuple(terms)


def _check_together(terms: Sequence[Term], spec: str) -> None:
    """Raise `RequestError` if the terms of a request can't be combined."""
    if len({term.host is None for term in terms}) > 1:
        raise RequestError(
            f"{spec!r} mixes this machine with the Ray cluster.",
            "Write ray:HOST/... for each device.",
        )
    kinds = list(dict.fromkeys(term.kind for term in terms))
    hosts = [term.host for term in terms if term.kind == "auto"]
    if (
        hosts
        and (len(terms) > 1)
        and (None in hosts or EVERY_HOST in hosts or len(set(hosts)) < len(terms))
    ):
        raise RequestError(
            f"auto can't be combined, as in {spec!r}.", "Ask for auto alone, or name the devices."
        )
    if len(kinds) > 1:
        raise RequestError(
            f"{spec!r} mixes {' and '.join(kinds)}: they can't train one step together.",
            "Ask for devices of one kind.",
        )


def _parse_term(text: str, before: Term | None, spec: str) -> Term:
    body, limit = _split_limit(text)
    if not body:
        raise RequestError(f"One part of {spec!r} is empty.", REMEDY)
    found = _LIMIT_WITHOUT_AT.fullmatch(body)
    if found:
        raise RequestError(f"{body!r} has a limit without an @.", f"Write {found[1]}@{found[2]}.")
    there = _WHERE.fullmatch(body)
    if there:
        inner = _parse_device((there[2] or "auto").strip(), limit, None)
        if inner.kind == "sim":
            raise RequestError(
                f"{body!r} is not a device: simulated devices need no cluster.", REMEDY
            )
        return msgspec.structs.replace(inner, host=(there[1] or EVERY_HOST).strip())
    return _parse_device(body, limit, before)


def _parse_device(body: str, limit: Limit, before: Term | None) -> Term:
    found = _TERM.fullmatch(body)
    if found is None:
        return _parse_pick(body, limit, before)
    kind = found[1].lower()
    if kind not in ("auto", *BACKENDS):
        return _parse_pick(body, limit, before)
    slices = found[2]
    colon = found[3]
    pick = (found[4] or "").strip()
    if not pick and (colon or kind == "sim"):
        raise RequestError(f"{body!r} names no device after the colon.", REMEDY)
    if slices and kind != "cpu":
        raise RequestError(f"{body!r} is not a device.", REMEDY)
    if colon and kind == "auto":
        raise RequestError(f"{body!r} is not a device.", REMEDY)
    return Term(kind, pick, limit, int(slices) if slices else None)


def _parse_pick(body: str, limit: Limit, before: Term | None) -> Term:
    """Parse a part of a request that doesn't name a kind of devices.

    It is a device id, or another index for the previous term, such as the 2 in `gpu:0,2`. Raises
    RequestError if it is neither.
    """
    if "-" in body:
        # an id's prefix names its kind; anything else has the kind of the term before
        for backend in all_backends():
            if body.lower().startswith(backend.id_prefixes):
                return Term(backend.kind, body, limit, host=before.host if before else None)
    if before is not None and before.pick:
        return Term(before.kind, body, limit, before.slices, before.host)
    raise RequestError(f"{body!r} is not a device.", REMEDY)


def _split_limit(text: str) -> tuple[str, Limit]:
    if "@" not in text or text.lower().endswith(".toml"):
        return text, NO_LIMIT
    body, _, limit = text.rpartition("@")
    return body.strip(), parse_limit(limit)


UNITS = {"b": 1} | {f"{sign}ib": 1 << 10 * i for i, sign in enumerate("kmgt", 1)}
UNITS |= {f"{sign}b": 1000**i for i, sign in enumerate("kmgt", 1)}
LARGEST_BYTES = 1 << 60
LIMIT_REMEDY = "Write a limit as 60%, 8GiB or 60%+8GiB."
_PART = re.compile(r"(\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})\s*(%|[a-zA-Z]{1,3})", re.ASCII)


def parse_limit(text: str) -> Limit:
    """Parse a limit such as `60%`, `8GiB` or `60%+8GiB`.

    A percentage limits compute, and a size limits memory. Raises `RequestError` if a part is
    malformed or repeated, if the percentage isn't above 0 and at most 100, or if the size is below
    1 byte or above 1 EiB.
    """
    found: dict[str, Decimal] = {}
    for part in text.split("+"):
        number, unit = _number_and_unit(part.strip(), text)
        kind = "percentage" if unit == "%" else "size"
        if kind in found:
            raise RequestError(f"The limit {text!r} gives two {kind}s.", LIMIT_REMEDY)
        found[kind] = number * UNITS.get(unit, 1)
    percent = found.get("percentage")
    size = found.get("size")
    if percent is not None and not 0 < percent <= 100:
        raise RequestError(
            f"The limit {text!r} is not a share of a device.", "Give more than 0 and at most 100 %."
        )
    if size is not None and not 1 <= size <= LARGEST_BYTES:
        raise RequestError(
            f"The limit {text!r} is not a size that a device can have.", LIMIT_REMEDY
        )
    return Limit(
        percent=None if percent is None else float(percent),
        memory_bytes=None if size is None else round(size),
    )


def write_limit(limit: Limit) -> str:
    """Return a limit as text that `parse_limit` can read, or "" if nothing is limited."""
    parts = []
    if limit.percent is not None:
        # the shortest decimal, without an exponent
        parts.append(f"{Decimal(repr(limit.percent)).normalize():f}%")
    if limit.memory_bytes is not None:
        sizes = {unit: UNITS[unit.lower()] for unit in ("TiB", "GiB", "MiB", "KiB", "B")}
        unit = next(unit for unit in sizes if limit.memory_bytes % sizes[unit] == 0)
        parts.append(f"{limit.memory_bytes // sizes[unit]}{unit}")
    return "+".join(parts)


def _number_and_unit(part: str, text: str) -> tuple[Decimal, str]:
    found = _PART.fullmatch(part)
    if not found:
        raise RequestError(
            f"The limit {text!r} holds {part!r}, which is neither a percentage nor a size.",
            LIMIT_REMEDY,
        )
    unit = found[2].lower()
    if unit != "%" and unit not in UNITS:
        message = f"The limit {text!r} has the unknown unit {found[2]!r}."
        raise RequestError(message, "Units are B, KiB, MiB, GiB, MB, GB.")
    return Decimal(found[1]), unit
