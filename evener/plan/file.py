"""Read and write plans, as TOML or JSON.

Reading is strict: unknown keys, ratios that don't match the batches, or a newer schema raise an
error that names the key. Writing is atomic. A plan that is read and written again has the same
bytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ..errors import PlanError
from ..printable import printable
from ..shares.whole_rows import apportion
from ..system.files import read_whole, write_atomically
from .layout import (
    BEST_SINGLE,
    BEST_SPLIT,
    EQUAL_SHARES,
    LARGER_BATCH,
    Count,
    Kind,
    PlanLayout,
    Share,
    check_layout,
    complete_layout,
    make_layout,
)
from .use import note_use

__all__ = [
    "BEST_SINGLE",
    "BEST_SPLIT",
    "EQUAL_SHARES",
    "LARGER_BATCH",
    "SCHEMA",
    "SOLO_PREFIX",
    "Evidence",
    "Fingerprint",
    "Format",
    "Kind",
    "Link",
    "Plan",
    "PlanLayout",
    "SearchSummary",
    "Share",
    "Throughput",
    "load_plan",
    "make_layout",
    "parse_plan",
    "to_json",
    "to_toml",
    "with_current_schema",
]

SCHEMA = 3  # for sharded plans; all other plans are written with schema 2
LONGEST_SECONDS = 1e12  # upper limit for a search's duration, so that it is finite
SOLO_PREFIX = "solo "  # followed by the device's label

Format = Literal["toml", "json"]
EvidenceKind = Literal[
    "equal_shares",  # on all devices of the request
    "other_shares",
    "best_device",  # the best single device of the race
    "one_device",  # a single device, at its fastest batch or at the plan's batch
    "larger_batch",  # faster than the plan, with more samples per step
    "other",
]
# keys that are omitted if their value is unknown
_OPTIONAL = ("cost", "tokens", "host", "curve", "most", "state", "held_bytes", "peak_bytes")
# a pair of numbers as tomli_w formats it, over four lines
_PAIR = re.compile(r"\[\n *([0-9.e+-]+),\n *([0-9.e+-]+),\n *\]")


class Throughput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The speed of a layout, with its 95 % interval."""

    samples_per_second: float
    low: float
    high: float
    # without padding; tokens_per_second and padding are written only if rows have lengths
    tokens_per_second: float = 0.0
    padding: float = 0.0  # fraction of the computed tokens that are padding
    # over all devices of the request; the next three are known only if all report their power
    samples_per_joule: float = 0.0
    active_watts: float = 0.0  # power of the devices that compute
    idle_watts: float = 0.0  # power of the devices that are left out


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A layout that was compared with the plan, and its measured speed."""

    name: str  # "equal shares", "best single device", "solo GPU:0", ..., for display
    layout: PlanLayout
    throughput: Throughput
    kind: EvidenceKind = "other"  # omitted if it is "other"
    tie: bool = False  # the plan is neither surely faster nor surely slower; written only if true
    # 0.12: the plan's samples/s are 12 % higher; None: not compared, or an old plan
    gain: float | None = None
    # the gain was measured in alternating turns and differs from the ratio of the two throughputs;
    # written only if true
    paired: bool = False
    # the other devices computed at the same time, which may have slowed this one; written only if
    # true
    busy: bool = False


class SearchSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The search that created the plan: its probes, its duration in seconds, and why it stopped."""

    probes: Count
    out_of_memory: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_SECONDS)]
    seed: int
    why_stopped: str


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices, versions and model that were used to measure a plan."""

    devices: tuple[str, ...]  # "name (memory MiB)" of each device
    driver: str
    versions: dict[str, str]  # framework -> version
    workload_digest: str


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connection between devices, with its measured bandwidth."""

    devices: tuple[str, ...]  # labels
    path: str  # type of the connection, such as NVLink; empty: unknown
    bytes_per_second: float

    def describe(self) -> str:
        """Return the devices, their connection and its speed in GB/s as text."""
        speed = f"{self.bytes_per_second / 1e9:.3g} GB/s"
        return f"{' – '.join(self.devices)}  {', '.join(filter(None, (self.path, speed)))}"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fastest layout that a search has found, with its measured speed.

    A plan that was written by hand has only a layout.
    """

    created: str = ""  # UTC, RFC 3339
    workload: str = ""
    framework: str = "none"
    precision: str = "float32"
    xla: bool = False
    layout: PlanLayout
    throughput: Throughput = Throughput(0.0, 0.0, 0.0)
    evidence: tuple[Evidence, ...] = ()
    search: SearchSummary = SearchSummary(0, 0, 0.0, 0, "")
    fingerprint: Fingerprint = Fingerprint((), "", {}, "")
    warnings: tuple[str, ...] = ()
    link: Link | None = None  # the link between the plan's devices; omitted if it wasn't measured
    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA - 1

    @property
    def ratios(self) -> tuple[float, ...]:
        """The fraction of the global batch that each device computes, or 0 if it is left out."""
        return self.layout.ratios

    @property
    def batches(self) -> tuple[int, ...]:
        """The rows that each device computes in a step, or 0 if it is left out."""
        return self.layout.batches

    def shares(self, global_batch: int | None = None) -> tuple[int, ...]:
        """Return how many rows of a global batch each device computes.

        `global_batch` is the plan's by default. The rows add up to it. In a plan for rows of
        unequal lengths, the ratios are fractions of a batch's cost; they are used as fractions of
        its rows here. Raises RequestError if `global_batch` isn't a whole number of at least 0.
        """
        batch = self.layout.global_batch if global_batch is None else global_batch
        if batch == self.layout.global_batch and not self.layout.by_cost:
            return self.batches
        return apportion(batch, self.ratios)

    def micros(self, global_batch: int | None = None) -> tuple[int, ...]:
        """Return the rows per pass of each device when a global batch is divided by this plan.

        `global_batch` is the plan's by default. A device that takes one pass in the plan takes one
        pass for any share.
        """
        return tuple(
            batch if share.micro in (0, share.batch) else min(batch, share.micro)
            for share, batch in zip(self.layout.share, self.shares(global_batch), strict=True)
        )

    def save(
        self,
        path: str | os.PathLike[str],
        format: Format | None = None,  # noqa: A002 - the public name
    ) -> None:
        """Write the plan to a file, as JSON if its name ends with ".json", and otherwise as TOML.

        `format` takes precedence over the name. Writing is atomic. Raises RequestError if the file
        can't be written.
        """
        target = Path(path)
        chosen = format or ("json" if target.suffix == ".json" else "toml")
        write_atomically(target, to_toml(self) if chosen == "toml" else to_json(self))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a TOML or JSON file.

    This also reports to `evener launch` that the script uses its plan. Raises PlanError if the file
    can't be read or the plan is invalid. The message names the key of an invalid value.
    """
    text = read_whole(path, "plan", "Give the file that evener balance --export wrote.", PlanError)
    note_use()
    return parse_plan(text, str(path))


def parse_plan(text: bytes, source: str = "plan") -> Plan:
    """Parse a plan in TOML or JSON. `source` is its name in error messages.

    Raises PlanError if the plan is invalid or from a newer version of evener.
    """
    data = _decode(text, source)
    schema = data.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise PlanError(
            f"{source} has schema {schema}; this evener reads up to {SCHEMA}.",
            "Update evener on this machine.",
        )
    try:
        data = _as_printable(data)
        _check_whole_numbers(data, source)
        known = {**data, "layout": complete_layout(data.get("layout", {}))}
        plan = msgspec.convert(known, Plan, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PlanError(
            f"{source}: {error}.",
            "Correct that key, or make the plan again with evener balance --export.",
        ) from None
    plan = _add_missing_kinds(with_current_schema(plan))
    _check_numbers(plan, source)
    _check_finite(data, source)
    return plan


def _add_missing_kinds(plan: Plan) -> Plan:
    """Fill in missing kinds of comparisons, such as "one_device", and return the plan."""
    # plans of evener 0.1 and 0.2 have only the names of comparisons, from which the kinds follow
    names: dict[str, EvidenceKind] = {
        EQUAL_SHARES: "equal_shares",
        "even split": "equal_shares",  # its name in versions before 0.3
        BEST_SPLIT: "other_shares",
        BEST_SINGLE: "best_device",
        LARGER_BATCH: "larger_batch",
    }
    found: list[Evidence] = []
    for evidence in plan.evidence:
        kind = evidence.kind
        if kind == "other":
            kind = (
                "one_device"
                if evidence.name.startswith(SOLO_PREFIX)
                else names.get(evidence.name, kind)
            )
        found.append(msgspec.structs.replace(evidence, kind=kind))
    return msgspec.structs.replace(plan, evidence=tuple(found))


def to_toml(plan: Plan) -> bytes:
    """Return the plan as TOML."""
    import tomli_w

    text: str = tomli_w.dumps(_ordered(plan))
    return _PAIR.sub(r"[\1, \2]", text).encode()


def to_json(plan: Plan) -> bytes:
    """Return the plan as indented JSON."""
    text: bytes = msgspec.json.format(msgspec.json.encode(_ordered(plan)), indent=2)
    return text + b"\n"


def _ordered(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = as_unicode(msgspec.to_builtins(with_current_schema(plan)))
    for layout in (data["layout"], *(rival["layout"] for rival in data["evidence"])):
        for share in layout["share"]:
            for key in _OPTIONAL:
                if not share[key]:
                    del share[key]
    if data["link"] is None:
        del data["link"]
    return {"schema": data.pop("schema"), **data}


def with_current_schema(plan: Plan) -> Plan:
    """Convert a plan to the schema in which evener now writes it."""
    # old journals contain plans of schema 1
    sharded = any(
        layout.traits.sharded
        for layout in (plan.layout, *(rival.layout for rival in plan.evidence))
    )
    schema = SCHEMA if sharded else SCHEMA - 1
    if plan.schema == schema:
        return plan
    evidence = tuple(
        msgspec.structs.replace(rival, layout=_upgrade_layout(rival.layout))
        for rival in plan.evidence
    )
    return msgspec.structs.replace(
        plan, schema=schema, layout=_upgrade_layout(plan.layout), evidence=evidence
    )


def _upgrade_layout(layout: PlanLayout) -> PlanLayout:
    """Fill in the rows per pass where a share lacks them, and return the layout.

    In older plans, shares that are computed in one pass lack them.
    """
    shares = (
        msgspec.structs.replace(share, micro=share.micro or share.batch) for share in layout.share
    )
    return msgspec.structs.replace(layout, share=tuple(shares))


def as_unicode(data: Any) -> Any:
    """Replace characters that UTF-8 can't encode by "?" in all strings of the data."""
    # file names may contain them, but neither TOML nor JSON can store them
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {as_unicode(key): as_unicode(item) for key, item in data.items()}
    return [as_unicode(item) for item in data] if isinstance(data, (list, tuple)) else data


def _decode(text: bytes, source: str) -> dict[Any, Any]:
    try:
        data = (msgspec.json if text.lstrip()[:1] == b"{" else msgspec.toml).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise PlanError(
            f"{source} is neither TOML nor JSON: {error}.", "Make it again with evener export."
        ) from None
    if not isinstance(data, dict):
        raise PlanError(
            f"{source} is not a plan: it has no keys.", "Give the file that --export wrote."
        )
    return data


def _as_printable(data: Any) -> Any:
    """Replace control characters in all strings of the data."""
    # training runs print such strings, for example device names
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {_as_printable(key): _as_printable(value) for key, value in data.items()}
    return [_as_printable(value) for value in data] if isinstance(data, list) else data


def _list_numbers(data: Any, where: str) -> Iterator[tuple[str, float]]:
    """Yield all numbers in the data, each with the name of its place."""
    if isinstance(data, int | float):
        yield where, data
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _list_numbers(value, f"{where}: {key}")
    if isinstance(data, list):
        for position, value in enumerate(data):
            yield from _list_numbers(value, f"{where}[{position}]")


def _check_whole_numbers(data: Any, source: str) -> None:
    """Raise PlanError if the data contain an integer of more than 64 bits."""
    # msgspec doesn't check such integers against a field's limits
    for where, number in _list_numbers(data, source):
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            raise PlanError(f"{where} is larger than any number of a plan.", "Correct that key.")


def _check_finite(data: Any, source: str) -> None:
    """Raise PlanError if the data contain infinity or NaN."""
    # TOML has such numbers and JSON doesn't, so a plan would differ by its format
    for where, number in _list_numbers(data, source):
        if not math.isfinite(number):
            raise PlanError(f"{where} is {number}, not a finite number.", "Correct that key.")


def _check_numbers(plan: Plan, source: str) -> None:
    check_layout(plan.layout, f"{source}: layout")
    _check_throughput(plan.throughput, f"{source}: throughput")
    for position, rival in enumerate(plan.evidence):
        check_layout(rival.layout, f"{source}: evidence[{position}].layout")
        if len(rival.layout.share) != len(plan.layout.share):
            raise PlanError(
                f"{source}: evidence[{position}].layout.share names {len(rival.layout.share)} "
                f"devices, and"
                f" layout.share {len(plan.layout.share)}.",
                "Each has one for every device of the request.",
            )
        _check_throughput(rival.throughput, f"{source}: evidence[{position}].throughput")


def _check_throughput(throughput: Throughput, where: str) -> None:
    values = (throughput.low, throughput.samples_per_second, throughput.high)
    if not all(map(math.isfinite, values)) or values[0] < 0 or list(values) != sorted(values):
        raise PlanError(
            f"{where} is {values[1]} in [{values[0]}, {values[2]}].",
            "low <= samples_per_second <= high, from 0.",
        )
