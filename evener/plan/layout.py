"""Layouts: which devices take part in training, and how many rows each of them computes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from ..errors import PlanError
from ..shares.curves import Cost, Curve

RATIO_TOLERANCE = 1e-6
EQUAL_SHARES = "equal shares"  # names in a plan's evidence
BEST_SPLIT = "best split"
BEST_SINGLE = "best single device"
LARGER_BATCH = "larger global batch"

# labels of GPUs by the prefix of their ids, as in each vendor's backend
GPU_IDS = {"GPU-": "GPU", "MIG-": "GPU"}
ENGINES = ("towers", "mirrored", "multiworker", "ddp")  # _WITHOUT_FRAMEWORK has the rest
_WITHOUT_FRAMEWORK = ("auto", "barrier", "simulated")

MOST_ROWS = 1 << 32  # maximum global batch; larger ones would take long to solve
Rows = Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]  # tokens, bytes or measurements
Kind = str  # the kind of a layout: a key of KINDS
# (rows, seconds per step) at the bends of a measured curve
Knots = tuple[tuple[float, float], ...]


class Traits(msgspec.Struct, frozen=True):
    """The properties that all layouts of one kind share."""

    alone: bool = False  # one training on one device
    together: bool = False  # one training on several devices that step together
    sharded: bool = False  # each device holds a part of the model's state
    placed: bool = False  # one training whose model the workload places on several devices
    side_by_side: bool = False  # several trainings on one device
    devices: tuple[int, int] = (1, 1 << 30)  # minimum and maximum number of devices with samples

    @property
    def by_shares(self) -> bool:
        """True if the devices compute shares of a global batch."""
        return self.alone or self.together


KINDS: dict[Kind, Traits] = {
    "solo": Traits(alone=True, devices=(1, 1)),
    "split": Traits(together=True, devices=(2, 1 << 30)),
    "shard": Traits(together=True, sharded=True, devices=(2, 1 << 30)),
    # one device of a sharded training, measured by itself; no plan has this kind
    "part": Traits(sharded=True, devices=(1, 1)),
    "pack": Traits(side_by_side=True),
    "place": Traits(placed=True),
}


def _find_gpu_kind(device: str) -> str:
    """Return the label of a GPU's kind, such as "GPU", or "" if the id isn't that of a GPU."""
    upper = device.upper()
    return next((kind for prefix, kind in GPU_IDS.items() if upper.startswith(prefix)), "")


def label_device(device: str, index: int) -> str:
    """Return a short label for a device, such as "GPU:0" or "CPU:1".

    An id of an unknown form is returned unchanged.
    """
    kind, numbered = _find_gpu_kind(device), re.match(r"([a-z]+)-(\d+)-", device)
    if kind:
        return f"{kind}:{index}"
    return f"{numbered[1].upper()}:{numbered[2]}" if numbered else device


def check_kind(kind: Kind) -> None:
    """Raise ValueError if there is no such kind of layout."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} isn't a kind of layout: {', '.join(KINDS)}")


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of a layout, with the rows that it computes per step and per pass."""

    # the GPU's UUID, or the name of a CPU slice or simulated device
    device: Annotated[str, msgspec.Meta(min_length=1)]
    # for messages, and for frameworks that number devices
    index: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    name: str
    batch: Rows  # samples; with `cost`, the mean number of samples
    ratio: float  # batch / global batch; with `cost`, the fraction of the global batch's cost
    limit: str = ""  # the limit given after `@` in a device name, such as "60%+8GiB"
    micro: Rows = 0  # rows per forward and backward pass; `batch` if one pass is enough
    cost: Cost | None = None  # cost of a padded pass, if rows have unequal lengths
    tokens: Count = 0  # maximum padded tokens per pass; 0: no known limit
    host: str = ""  # name or address of the device's machine, if the plan spans several machines
    curve: Knots = ()  # measured step times by rows; empty: not measured
    most: Rows = 0  # maximum rows per pass that fit in its memory; 0: unknown
    # fraction of parameters, gradients and optimizer state that the device holds; 0: all of them
    state: float = 0.0
    # bytes of that fraction and of gathered units, by evener's ledger; 0: unknown
    held_bytes: Count = 0
    # the highest peak memory measured in steps of these shares, including activations, and 0.2 %
    # more for the allocator's blocks; 0: unknown
    peak_bytes: Count = 0

    @property
    def takes_part(self) -> bool:
        """True if the device computes rows or holds a part of the model."""
        return bool(self.batch or self.state)

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return bool(self.gpu_label)

    @property
    def gpu_label(self) -> str:
        """The label of a GPU, such as "GPU:0", or "" for a device that isn't one."""
        kind = _find_gpu_kind(self.device)
        return f"{kind}:{self.index}" if kind else ""

    @property
    def label(self) -> str:
        """The device's label for messages, such as "GPU:0" or "node1/GPU:0".

        It is "cuda:0" if only PyTorch's name of the GPU is known.
        """
        # `index` then counts only the GPUs that this process sees
        is_own = self.on_gpu and self.name == f"cuda:{self.index}"
        name = self.name if is_own else label_device(self.device, self.index)
        return f"{self.host}/{name}" if self.host else name


class PlanLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices of a training run, and how they divide its global batch."""

    kind: Kind
    global_batch: Rows  # samples per optimizer step, over all devices (pack: per process)
    share: tuple[Share, ...]
    engine: str = ""  # one of ENGINES; empty if there is no choice
    # pack: the number of trainings that run on the device at the same time
    processes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    placement: str = ""  # place: the workload's name for the placement

    def __post_init__(self) -> None:
        check_kind(self.kind)

    @property
    def traits(self) -> Traits:
        """The properties that all layouts of this kind share."""
        return KINDS[self.kind]

    @property
    def batches(self) -> tuple[int, ...]:
        """The rows that each device computes in a step, or 0 if it is left out."""
        return tuple(share.batch for share in self.share)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The fraction of the global batch that each device computes."""
        return tuple(share.ratio for share in self.share)

    @property
    def active(self) -> tuple[Share, ...]:
        """The shares of the devices that take part."""
        return tuple(share for share in self.share if share.takes_part)

    @property
    def by_cost(self) -> bool:
        """True if ratios are fractions of a batch's cost rather than of its rows.

        That is the case if the rows have unequal lengths.
        """
        return any(share.cost is not None for share in self.active)

    @property
    def states(self) -> tuple[float, ...]:
        """The fraction of the model's state on each active device.

        The result is () if the state isn't sharded.
        """
        return tuple(share.state for share in self.active) if self.traits.sharded else ()


def make_layout(
    kind: Kind,
    devices: tuple[Share, ...],
    batches: tuple[int, ...],
    *,
    micros: tuple[int, ...] | None = None,
    ratios: tuple[float, ...] | None = None,
    engine: str = "",
    processes: int = 1,
    placement: str = "",
) -> PlanLayout:
    """Return a layout in which each device computes the given number of rows.

    - `batches`: rows per step of each device.
    - `micros`: rows per pass of each device; by default, each device takes one pass.
    - `ratios`: the devices' fractions of the batch; by default, in proportion to `batches`.
    - `engine`: how a framework uses several devices, such as "ddp"; "" if there is no choice.
    - `processes`: the number of training runs that share the device.
    - `placement`: the workload's name for how it places the model on several devices, or "".
    """
    total = sum(batches)
    chosen = ratios or tuple(batch / total if total else 0.0 for batch in batches)
    shares = tuple(
        msgspec.structs.replace(device, batch=batch, ratio=ratio, micro=micro)
        for device, batch, ratio, micro in zip(
            devices, batches, chosen, micros or batches, strict=True
        )
    )
    return PlanLayout(kind, total, shares, engine, processes, placement)


def complete_layout(layout: Any) -> Any:
    """Add defaults for missing keys to a layout that was read from a file."""
    # Missing keys are derived from the devices and batches. If there is no valid list of shares,
    # the layout is returned unchanged, and reading the plan raises an error later.
    shares = layout.get("share", []) if isinstance(layout, dict) else None
    if not isinstance(shares, list) or not all(isinstance(each, dict) for each in shares):
        return layout
    batches = [_read_batch(share) for share in shares]
    total = sum(batches)
    completed = [
        {
            "index": i,
            "name": share.get("device", ""),
            "ratio": batch / max(1, total),
            "micro": batch,
            **share,
        }
        for i, (share, batch) in enumerate(zip(shares, batches, strict=True))
    ]
    kind = "split" if sum(map(bool, batches)) > 1 else "solo"
    kind = "shard" if any(share.get("state") for share in shares) else kind
    return {"kind": kind, "global_batch": total, **layout, "share": completed}


def _read_batch(share: dict[str, Any]) -> int:
    """Return the rows of a share that was read from a file, or 0 if they are invalid."""
    # the invalid number is reported when the share itself is read
    batch = share.get("batch")
    return batch if type(batch) is int and 0 <= batch <= MOST_ROWS else 0


def check_layout(layout: PlanLayout, where: str) -> None:
    """Raise PlanError if a layout contradicts itself. `where` names it in the message."""
    if not any(layout.batches):
        raise PlanError(
            f"{where}.share gives no device a sample.", "At least one batch is above 0."
        )
    fewest, most = layout.traits.devices
    if not fewest <= len(layout.active) <= most:
        raise PlanError(
            f"{where}.kind is {layout.kind}, but {len(layout.active)} of its devices have samples.",
            "One device is solo, several are a split.",
        )
    if len({bool(share.host) for share in layout.share}) > 1:
        raise PlanError(
            f"{where}.share has some of its devices on a host.",
            "Name a host for all of them, or for none.",
        )
    if layout.engine not in ("", *ENGINES, *_WITHOUT_FRAMEWORK):
        raise PlanError(
            f"{where}.engine is {layout.engine}.",
            f"Write one of {', '.join(ENGINES)}, or leave it out.",
        )
    _check_named_once(layout, where)
    total = sum(layout.batches)
    if total != layout.global_batch:
        raise PlanError(
            f"{where}.global_batch is {layout.global_batch}, but the shares sum to {total}.",
            "Correct the one that is wrong.",
        )
    check_ratios = _check_ratios_of_cost if layout.by_cost else _check_ratios_of_rows
    check_ratios(layout, where)
    for position, share in enumerate(layout.share):
        _check_share(share, f"{where}.share[{position}]")
    _check_states(layout, where)


def _check_named_once(layout: PlanLayout, where: str) -> None:
    """Raise PlanError if two shares have the same device or the same index."""
    for key in ("index", "device"):
        seen = set()
        for share in layout.share:
            name = share.host, getattr(share, key)
            if name in seen:
                raise PlanError(
                    f"{where}.share has the {key} {name[1]} twice.", "Each device has one share."
                )
            seen.add(name)


def _check_states(layout: PlanLayout, where: str) -> None:
    """Raise PlanError if the devices' fractions of the model's state are invalid."""
    states = [share.state for share in layout.share]
    # they sum to 1 in a sharded layout, and are 0 in all others
    if not layout.traits.sharded:
        if any(states):
            raise PlanError(
                f"{where}.kind is {layout.kind}, but its devices have a state.",
                "A sharded layout is a shard.",
            )
        return
    if not (all(map(_has_valid_state, layout.share)) and _is_whole(states)):
        raise PlanError(
            f"{where}.share has the states {', '.join(map(str, states))}.",
            "Give each device with rows its part of the model's state; they sum to 1.",
        )


def _has_valid_state(share: Share) -> bool:
    """Return True if a device holds a valid fraction of the model's state.

    Only a device that computes no rows may hold none of the state.
    """
    if not share.state:
        return not share.batch
    return math.isfinite(share.state) and share.state > 0


def _is_whole(parts: Sequence[float]) -> bool:
    return abs(sum(parts) - 1) <= RATIO_TOLERANCE


def _check_share(share: Share, where: str) -> None:
    if share.cost is not None and not share.cost.is_valid():
        raise PlanError(
            f"{where}.cost is {share.cost}.", "Its seconds are 0 or above, and not all 0."
        )
    if not is_curve(share.curve):
        raise PlanError(
            f"{where}.curve is {share.curve}.",
            (
                "Its pairs are (rows, seconds), both from 0, the rows rising and the seconds "
                "never falling."
            ),
        )
    if not min(share.batch, 1) <= share.micro <= share.batch:
        raise PlanError(
            f"{where}.micro is {share.micro}, but its batch is {share.batch}.",
            f"Write the rows of one pass, 1 to {share.batch}."
            if share.batch
            else "Write 0, as for the batch.",
        )


def is_curve(curve: Knots) -> bool:
    """Return True if the points form a valid curve, or if there are no points.

    A point has a number of rows and a time in seconds. A curve has at least two points. Rows
    increase from point to point, and seconds never decrease.
    """
    if not curve:
        return True
    rows, seconds = zip(*curve, strict=True)
    if len(curve) < 2 or not all(map(math.isfinite, (*rows, *seconds))):
        return False
    if rows[0] < 0 or seconds[0] < 0 or seconds[-1] <= 0:
        return False
    return all(a < b for a, b in pairwise(rows)) and list(seconds) == sorted(seconds)


def cut_curve(curve: Curve, batch: int) -> Knots:
    """Return the points of a curve up to `batch` rows, rounded to six digits, for a plan file."""
    bends = len(curve.batches) if curve.bent else 1
    knots = [
        (rows, time)
        for rows, time in zip(curve.batches[:bends], curve.times, strict=False)
        if rows < batch - 0.5
    ]
    return tuple(
        (_round(rows), _round(time)) for rows, time in (*knots, (batch, curve.seconds(batch)))
    )


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _check_ratios_of_rows(layout: PlanLayout, where: str) -> None:
    for position, share in enumerate(layout.share):
        expected = share.batch / layout.global_batch
        if not math.isfinite(share.ratio) or abs(share.ratio - expected) > RATIO_TOLERANCE:
            raise PlanError(
                f"{where}.share[{position}].ratio is {share.ratio}, but its batch is "
                f"{share.batch} of"
                f" {layout.global_batch}.",
                f"Write ratio = {expected!r}, or change the batch.",
            )


def _check_ratios_of_cost(layout: PlanLayout, where: str) -> None:
    for position, share in enumerate(layout.share):
        if share.batch and share.cost is None:
            raise PlanError(
                f"{where}.share[{position}] has no cost, and others have one.",
                "Give each active device's, or none.",
            )
        if (
            not math.isfinite(share.ratio)
            or share.ratio < 0
            or (share.ratio > 0) != (share.batch > 0)
        ):
            raise PlanError(
                f"{where}.share[{position}].ratio is {share.ratio}, but its batch is "
                f"{share.batch}.",
                "Write its part of the global batch's cost: above 0 where it has samples, else 0.",
            )
    if not _is_whole(layout.ratios):
        raise PlanError(
            f"{where}.share has ratios that sum to {sum(layout.ratios)}.",
            "Parts of the cost sum to 1.",
        )
