"""The interface of a backend, the code that supports one kind of devices.

There are backends for NVIDIA GPUs, CPU slices and simulated devices. This module also has what they
share: `visible_devices` and `choose_devices` select devices by the rules of CUDA_VISIBLE_DEVICES.
`VitalsWatch` watches a device for anything that may distort a measurement, such as throttling,
memory that other programs use, or a driver that stops answering. docs/architecture.md, "To add a
maker of devices", lists what another vendor's devices need.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from evener.errors import DeviceError, RequestError

from .machine import Machine
from .types import Device, Source, Term, limited

CROWDED = 0.05  # fraction of a device's memory; if others use more, there is a note
_INDEX = re.compile(r"\d{1,6}", re.ASCII)


class Listing(msgspec.Struct, frozen=True):
    """The devices of one kind on this machine, as their driver reports them."""

    devices: tuple[Device, ...]
    used_bytes: dict[str, int | None] = {}  # memory in use now, by device id
    notes: tuple[str, ...] = ()
    driver: str = ""  # the driver's version; empty if it doesn't report one


class Discovery(msgspec.Struct, frozen=True):
    """The devices that a `--devices` request selects, with messages for the user."""

    devices: tuple[Device, ...]
    # messages for the user, such as what `auto` chose and why, or that others use a device
    notes: tuple[str, ...] = ()
    machine: Machine | None = None  # the simulated machine, if the devices are simulated
    driver: str = ""  # version of the devices' driver


def choose_devices(
    listing: Listing, terms: Sequence[Term], visible: Sequence[Device], hiding_setting: str
) -> Discovery:
    """Return the devices that a request selects from those of one kind.

    - `listing`: all devices of the kind.
    - `terms`: the parsed parts of the request. The devices get the limits of their terms.
    - `visible`: the devices that a term without an index or UUID selects.
    - `hiding_setting`: what hides the other devices, such as "CUDA_VISIBLE_DEVICES=''", for the
      error message.

    The result is in the order of the terms. Its messages name each device on which other processes
    already use more than 5 % of the memory. Raises DeviceError if no device is visible, and
    RequestError if a term matches no device or several.
    """
    chosen: list[Device] = []
    for term in terms:
        picked = (pick_device(listing.devices, term.pick),) if term.pick else visible
        if not picked:
            kind = listing.devices[0].kind.upper()
            raise DeviceError(
                f"{hiding_setting} hides every {kind}.",
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
    """Return the device that `pick` selects, by its index, its UUID or the beginning of its UUID.

    Raises RequestError if there is no such device, or if several UUIDs begin with `pick`.
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
    """Return the devices that CUDA_VISIBLE_DEVICES, or a variable like it, makes visible.

    `variable` is the variable's value. If it is None, the variable isn't set, and all devices are
    visible. The result is in the variable's order. As in CUDA, the first unknown entry ends the
    list, and if a device is listed twice, none is visible.
    """
    # these are CUDA's rules; source: CUDA C++ programming guide, environment variables
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
    """A device's throttling, clock, memory, processes and energy at one moment.

    A field is None if the device doesn't report it. The `..._seconds` fields are totals since the
    driver was loaded or the reader was created, so only their differences are meaningful.
    """

    at_seconds: float = 0.0  # monotonic
    # seconds throttled by heat, a power brake or a fault, whichever is longest
    held_seconds: float | None = None
    braked_seconds: float | None = None  # seconds throttled by a power brake
    capped_seconds: float | None = None  # seconds throttled by the power limit
    # current clock of the multiprocessors as a fraction of the highest that it reached
    clock_fraction: float | None = None
    # total memory in use; only full readings update this and the next three fields
    used_bytes: int | None = None
    processes: Mapping[int, int | None] = {}  # pid -> bytes; None: not reported
    # pid -> fraction of the time since the last full reading in which its kernels ran
    busy: Mapping[int, float] = {}
    busy_percent: float | None = None  # time in which any kernel ran, in % of the last moments
    # from the driver's energy counter, or else power integrated over the readings
    joules: float | None = None
    trouble: str = ""  # a message that says why the device can't be used now


class VitalsReader(Protocol):
    """Reads a device's vitals (throttling, clock, memory and so on) from its driver.

    Calls may block. A reader isn't thread-safe: only one thread at a time may use it.
    """

    def read(self, full: bool) -> Vitals:
        """Return the device's vitals. Memory, processes and load are read only if `full` is True.

        If the driver fails, no error is raised; the field `trouble` describes the failure.
        """

    def close(self) -> None:
        """Release the driver. May be called more than once."""


class VitalsWatch:
    """Reads a device's vitals in background threads, so that a hanging driver can't block callers.

    Until the driver has answered for the first time, vitals are empty, and its failures aren't
    reported.
    """

    def __init__(self, reader: VitalsReader) -> None:
        self._reader = reader
        # True once the driver has answered; from then on, a missing answer is reported as trouble
        self._has_answered = False
        self._last = Vitals()
        self._began: float | None = None  # when the thread called the driver
        self._thread: threading.Thread | None = None  # one thread per reading
        self._closed = False

    def ask(self, full: bool = False) -> bool:
        """Start a reading in the background, unless one is already running.

        Memory, processes and load are read only if `full` is True. Returns True if the reading was
        started. After `close`, nothing is started.
        """
        if self.pending or self._closed:
            return False
        self._start(self._answer, full)
        return True

    def answer(self, until: float = 0.0) -> Vitals:
        """Return the latest vitals, after waiting for a reading that is in progress.

        `until` is when the wait ends at the latest, in seconds of the monotonic clock.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._last

    @property
    def pending(self) -> bool:
        """True if a reading is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """How long the current reading has taken, in seconds, or 0 if none is in progress."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Stop reading. A background thread closes the reader once the driver has answered.

        May be called more than once.
        """
        if not self._closed:
            self._closed = True
            self._start(self._finish, self._thread)

    def _start(self, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(
            target=target, args=(argument,), name="evener-vitals", daemon=True
        )
        thread.start()  # before other threads see it, because they may join it at once
        self._thread = thread

    def _answer(self, full: bool) -> None:
        self._began = time.monotonic()
        found = self._reader.read(full)
        self._has_answered = self._has_answered or not found.trouble
        self._last = found if self._has_answered else Vitals(found.at_seconds)
        self._began = None

    def _finish(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._reader.close()


# variables for children that make frameworks log less
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


class ChildEnvironment(msgspec.Struct, frozen=True):
    """The environment variables and limits of a process that trains on certain devices.

    The process itself enforces `address_space_bytes` by calling `cap_address_space`.
    """

    variables: dict[str, str]  # to set; the rest of the environment is inherited
    cores: tuple[int, ...] = ()  # for os.sched_setaffinity; empty: not set
    # bytes by which the child may grow after importing the framework; None: no limit
    address_space_bytes: int | None = None
    threads: int | None = None  # compute threads; None: the framework's own choice


class Backend(Protocol):
    """The code that supports one kind of devices: finds, limits and reads them.

    Subclasses are registered in `devices/registry.py`. Importing their modules must not start a
    driver.
    """

    # the name in `--devices`, in labels (GPU:0) and in `Device.kind`; lower case letters and digits
    kind: str
    maker: str = ""  # the maker's name; empty: there is no maker's driver
    own_memory: bool = True  # False: devices share the host's memory, or are simulated
    simulated: bool = False
    # lower case: a term of `--devices` that starts with one of these is a device's id
    id_prefixes: tuple[str, ...] = ()
    # the variable that selects visible devices; set to "" for a child on devices of another kind
    visible_variable: str = ""
    # prefixes of variables that the driver reads only after a framework is imported
    late_variables: tuple[str, ...] = ()
    # beginnings of the names of the driver's files, which its management library opens too
    driver_files: tuple[str, ...] = ()
    # programs that run other processes' kernels, which the driver counts as theirs
    server_programs: tuple[str, ...] = ()
    # lower case: names of libraries; an error that contains one may concern a single device
    device_words: tuple[str, ...] = ()
    # lower case: an error that contains one of these means that memory ran out
    memory_words: tuple[str, ...] = ()
    torch_name: str = ""  # PyTorch's word for these devices: "cuda"
    tensorflow_name: str = ""  # TensorFlow's: "GPU"
    # module run by `python -m`; exits with 0 if the first visible device computes
    check_module: str = "evener.errors"
    remedy: str = "Check the driver and dmesg."  # shown if a device doesn't compute
    # pairs of a package and the one that evener needs, if both install the same module
    double_packages: tuple[tuple[str, str], ...] = ()
    settle_seconds: float = 0.05  # between a source's first sample and the first with rates

    def list_devices(self) -> Listing:
        """Return all devices of this kind on this machine.

        Raises DeviceError if there are none, or if their driver can't be used.
        """
        raise DeviceError(f"This machine can't list devices of the kind {self.kind}.")

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """Return the devices of this kind that a request selects.

        `terms` are the parsed parts of the request, and `variables` are environment variables, such
        as CUDA_VISIBLE_DEVICES. The result is in the order of the terms. Raises DeviceError if no
        device is visible, and RequestError if a term matches none.
        """
        listing = self.list_devices()
        hidden = f"{self.visible_variable}={variables.get(self.visible_variable)!r}"
        return choose_devices(listing, terms, self.visible(listing.devices, variables), hidden)

    def has_started_driver(self, files: Collection[str]) -> bool:
        """Return True if this process has started the driver to compute, and so can't be forked.

        `files` are the names of all files that the process has open. This default implementation
        returns True if any of them belongs to the driver.
        """
        return any(name.startswith(self.driver_files) for name in files)

    def visible(
        self, devices: Sequence[Device], variables: Mapping[str, str]
    ) -> tuple[Device, ...]:
        """Return which of the devices a process with these environment variables would see.

        A variable such as CUDA_VISIBLE_DEVICES selects them and determines their order.
        """
        return visible_devices(devices, variables.get(self.visible_variable))

    def write_term(self, device_id: str) -> str:
        """Return the part of a `--devices` request that selects the device with this id.

        Raises DeviceError if the device can't train.
        """
        return device_id

    def open_source(self, discovery: Discovery) -> Source:
        """Return a source that samples the discovered devices.

        Raises DeviceError if the driver was unloaded after the discovery.
        """

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """Return the environment of a process that trains on `devices` and sees no others.

        `framework` is "tensorflow", "torch" or "none". Raises DeviceError if a limit can't be
        enforced.
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
        """Return environment variables that make only the devices with these ids visible.

        A process then sees them in this order.
        """
        return {self.visible_variable: ",".join(ids)} if self.visible_variable else {}

    def show_by_number(self, devices: Sequence[Device]) -> dict[str, str]:
        """Return environment variables that make only these devices visible, in this order.

        If the devices have both indices and UUIDs, the variables contain the indices.
        """
        return self.show([device.id for device in devices])

    def name_in(self, framework: str, number: int) -> str:
        """Return the name of a device in a framework, such as "cuda:0".

        `number` is its index among the visible devices.
        """
        words = {"torch": self.torch_name, "tensorflow": self.tensorflow_name}
        return f"{words.get(framework) or self.kind.upper()}:{number}"

    def open_vitals(self, device: Device) -> VitalsReader | None:
        """Return a reader of the device's vitals, or None if the device has no driver."""
        return None

    def name_path(self, first: Device, second: Device) -> str:
        """Return the connection between two devices, such as "NVLink", or "" if unknown."""
        return ""

    def bus_address(self, device: Device) -> str:
        """Return the device's PCI address, such as "0000:3b:00.0", or "" if it has none."""
        # a search locks the sysfs file at this address, so that different users don't measure on
        # the device at the same time
        return ""

    def daemon_runs(self) -> bool:
        """Return True if a daemon is running that lets processes share a device, such as MPS."""
        return False
