"""The questions that evener asks of a kind of devices; NVIDIA's GPUs, CPU slices and simulated
devices answer them.

Here are also their answers: which listed devices a request means, by the rules of
CUDA_VISIBLE_DEVICES that other makers' variables share, and one device's vitals, which can spoil a
measurement (throttling, others' memory, a driver that goes silent). docs/architecture.md, "To add a
maker of devices", says which file to write and which line to add.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from evener.errors import DeviceError, RequestError

from .machine import Machine
from .types import Device, Source, Term, limited

CROWDED = 0.05  # of a device's memory: others' use above it is worth a note
_INDEX = re.compile(r"\d{1,6}", re.ASCII)


class Listing(msgspec.Struct, frozen=True):
    """The devices of one kind that a driver lists, and notes on those that don't answer."""

    devices: tuple[Device, ...]
    used_bytes: dict[str, int | None] = {}  # by id: the memory in use on it now
    notes: tuple[str, ...] = ()
    driver: str = ""  # its version; empty if it doesn't say


class Discovery(msgspec.Struct, frozen=True):
    """The devices of a request, and notes on them."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()  # to be shown: what `auto` chose and why, a device that others use
    machine: Machine | None = None  # the physics, if the devices are simulated
    driver: str = ""  # version of the devices' driver


def choose_devices(
    listing: Listing, terms: Sequence[Term], visible: Sequence[Device], hidden: str
) -> Discovery:
    """The listed devices that the terms name; one without a pick means all visible ones; `hidden`
    says why none is.
    """
    chosen: list[Device] = []
    for term in terms:
        picked = (pick_device(listing.devices, term.pick),) if term.pick else visible
        if not picked:
            kind = listing.devices[0].kind.upper()
            raise DeviceError(
                f"{hidden} hides every {kind}.",
                f"Unset it, or name {kind}s as in {kind.lower()}:0.",
            )
        chosen += [limited(device, term.limit) for device in picked]
    crowded = []
    for device in chosen:
        used = listing.used_bytes.get(device.id) or 0
        if device.memory_bytes and used > CROWDED * device.memory_bytes:
            crowded.append(
                f"{device.label} has {used / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB "
                f"in use by others."
            )
    return Discovery(tuple(chosen), (*listing.notes, *crowded), driver=listing.driver)


def pick_device(devices: Sequence[Device], pick: str) -> Device:
    """The device with this index, this id, or the only one whose id begins so; RequestError names
    what is there.
    """
    found = _matching(devices, pick)
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{device.index} ({device.name}, {device.id})" for device in devices)
    if found:
        raise RequestError(
            f"{pick!r} is the beginning of {len(found)} UUIDs.", f"Write more of it: {there}."
        )
    raise RequestError(
        f"There is no {devices[0].kind.upper()} {pick!r}.", f"This machine has {there}."
    )


def visible_devices(devices: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """The devices that a variable's text leaves, in its order; None: it isn't set.

    Entries are indices or beginnings of ids; all behind the first that names no device are ignored,
    and a device named twice hides them all. Source: CUDA C++ programming guide, environment
    variables.
    """
    if variable is None:
        return tuple(devices)
    chosen: list[Device] = []
    for text in variable.split(","):
        found = _matching(devices, text.strip())
        if len(found) != 1:
            break
        if found[0] in chosen:
            return ()
        chosen += found
    return tuple(chosen)


def _matching(devices: Sequence[Device], pick: str) -> list[Device]:
    if _INDEX.fullmatch(pick):
        return [device for device in devices if device.index == int(pick)]
    wanted = pick.lower()
    if not wanted.startswith(
        tuple(f"{device.id.lower().partition('-')[0]}-" for device in devices)
    ):
        return []
    exact = [device for device in devices if device.id.lower() == wanted]
    return exact or [device for device in devices if device.id.lower().startswith(wanted)]


class Vitals(msgspec.Struct, frozen=True):
    """One reading of a device; None for what it doesn't report. Seconds add up since the driver or
    the watch began.
    """

    at_seconds: float = 0.0  # monotonic
    held_seconds: float | None = None  # by heat, a power brake or a fault: the longest of these
    braked_seconds: float | None = None  # by a power brake alone
    capped_seconds: float | None = None  # by its power limit
    clock_part: float | None = None  # of the highest clock of its multiprocessors, now
    used_bytes: int | None = None  # by everybody; read only in full readings, as are the next three
    processes: Mapping[int, int | None] = {}  # pid -> bytes, as far as the driver reports
    busy: Mapping[int, float] = {}  # pid -> part of the time in which its kernels ran; as above
    busy_percent: float | None = None  # of the last moments in which anybody's kernel ran
    # by the driver's energy counter, else power summed up over the readings
    joules: float | None = None
    trouble: str = ""  # why the device can't be used now, as a sentence


class VitalsReader(Protocol):
    """A maker's own calls behind the vitals of one device; one thread at a time calls it."""

    def read(self, full: bool) -> Vitals:
        """One reading, with memory and processes if it is full; what the driver does wrong is its
        `trouble`.
        """

    def close(self) -> None:
        """Let go of the driver; it may be called twice."""


class VitalsWatch:
    """The watch over one device. A driver that was never there is no trouble: nothing is reported
    then.
    """

    def __init__(self, reader: VitalsReader) -> None:
        self._reader = reader
        self._ever = False  # it has answered before: from then on silence is trouble
        self._last = Vitals()
        self._began: float | None = None  # when the thread came to ask the driver
        self._thread: threading.Thread | None = None  # one for each question
        self._closed = False

    def ask(self, full: bool = False) -> bool:
        """Ask the driver once more; False if it has not answered the question before."""
        if self.pending or self._closed:
            return False
        self._start(self._answer, full)
        return True

    def answer(self, until: float = 0.0) -> Vitals:
        """The driver's last answer, or the one before it if that takes longer than `until`, in
        monotonic seconds.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._last

    @property
    def pending(self) -> bool:
        """True while the driver has not answered."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """The time that the driver has had for its answer; a thread that waits for a busy CPU is
        not silence.
        """
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End the watch; a thread that the driver holds ends when it lets go. It may be called
        twice.
        """
        if not self._closed:
            self._closed = True
            self._start(self._finish, self._thread)

    def _start(self, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(
            target=target, args=(argument,), name="evener-vitals", daemon=True
        )
        thread.start()  # before others see it: they may join it at once
        self._thread = thread

    def _answer(self, full: bool) -> None:
        self._began = time.monotonic()
        found = self._reader.read(full)
        self._ever = self._ever or not found.trouble
        self._last = found if self._ever else Vitals(found.at_seconds)
        self._began = None

    def _finish(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._reader.close()


# for children: frameworks write less
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


class ChildEnvironment(msgspec.Struct, frozen=True):
    """A child's start on its devices; the child applies `address_space_bytes` itself, by
    `cap_address_space`.
    """

    variables: dict[str, str]  # to set; the rest of the environment is inherited
    cores: tuple[int, ...] = ()  # for os.sched_setaffinity; empty: leave it
    # room to grow, counted from when the framework is imported; None: no cap
    address_space_bytes: int | None = None
    threads: int | None = None  # compute threads; None: the framework's own choice


class Backend(Protocol):
    """One kind of devices; a maker's class inherits it and overrides what its devices have.

    A process has one object of each class, made by `devices/registry.py`: importing its module
    starts no driver.
    """

    # the word in `--devices`, in labels (GPU:0) and in `Device.kind`; lower case letters and digits
    kind: str
    maker: str = ""  # the name that people know; empty: no maker's driver is asked
    own_memory: bool = True  # False: devices share the host's memory, or are simulated
    simulated: bool = False
    # lower case: what begins so in `--devices` is the id of such a device
    id_prefixes: tuple[str, ...] = ()
    # names the devices that a process may use; a child of another kind gets it empty
    visible_variable: str = ""
    # prefixes of those that the driver reads after a framework is imported
    late_variables: tuple[str, ...] = ()
    # parts of the names of files that a process has open once its driver runs
    driver_files: tuple[str, ...] = ()
    # lower case: its libraries; an error that names one may be one device's own
    device_words: tuple[str, ...] = ()
    # lower case: an error that says one means that memory ran out
    memory_words: tuple[str, ...] = ()
    torch_name: str = ""  # PyTorch's word for these devices: "cuda"
    tensorflow_name: str = ""  # TensorFlow's: "GPU"
    # `python -m` exits with 0 if the first visible one computes
    check_module: str = "evener.errors"
    remedy: str = "Check the driver and dmesg."  # for devices that don't compute
    # (one, another that evener needs) with the same module
    double_packages: tuple[tuple[str, str], ...] = ()
    settle_seconds: float = 0.05  # from a source's first sample to one with rates

    def list_devices(self) -> Listing:
        """Every device of this kind that this machine has; DeviceError if there is none or its
        driver fails.
        """
        raise DeviceError(f"This machine can't list devices of the kind {self.kind}.")

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """The devices that the terms name, in their order, with notes; the environment `variables`
        may hide some.

        DeviceError: there are none, or all are hidden. RequestError: one that is named isn't there.
        """
        listing = self.list_devices()
        hidden = f"{self.visible_variable}={variables.get(self.visible_variable)!r}"
        return choose_devices(listing, terms, self.visible(listing.devices, variables), hidden)

    def visible(
        self, devices: Sequence[Device], variables: Mapping[str, str]
    ) -> tuple[Device, ...]:
        """The listed devices that the environment `variables` leave to a process, in the order that
        they say.
        """
        return visible_devices(devices, variables.get(self.visible_variable))

    def write_term(self, device_id: str) -> str:
        """A plan's device as `--devices` names it: its id; DeviceError for one that can't train."""
        return device_id

    def open_source(self, found: Discovery) -> Source:
        """A source that samples these devices for the monitor; DeviceError if the driver has gone
        since.
        """

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """A child's start on these devices alone with "tensorflow", "torch" or "none"; DeviceError
        if it can't be.
        """
        for device in devices:
            if device.limit.percent:
                message = (
                    f"{device.label} can't be held to {device.limit.percent:g} %: nothing here "
                    f"does that."
                )
                raise DeviceError(message, "Omit the percentage.")
        return ChildEnvironment({**QUIET, **self.show([device.id for device in devices])})

    def show(self, ids: Sequence[str]) -> dict[str, str]:
        """The variables by which a process sees the devices with these ids, in this order, and no
        other.
        """
        return {self.visible_variable: ",".join(ids)} if self.visible_variable else {}

    def name_in(self, framework: str, number: int) -> str:
        """The name of a child's device with this number in its framework: "cuda:0", "GPU:0"."""
        words = {"torch": self.torch_name, "tensorflow": self.tensorflow_name}
        return f"{words.get(framework) or self.kind.upper()}:{number}"

    def open_vitals(self, device: Device) -> VitalsReader | None:
        """A reader that a probe asks between its timed blocks; None: nothing is known of such
        devices.
        """
        return None

    def name_path(self, first: Device, second: Device) -> str:
        """The way data takes between two devices of this kind, in words; empty if unknown."""
        return ""

    def bus_address(self, device: Device) -> str:
        """The PCI address as sysfs writes it, like 0000:3b:00.0: its file is locked between users;
        empty: none is.
        """
        return ""

    def daemon_runs(self) -> bool:
        """True if a daemon runs by which processes compute on one device at the same time, as by
        NVIDIA's MPS.
        """
        return False
