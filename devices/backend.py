"""The interface of a backend, which implements one kind of devices.

There are backends for NVIDIA GPUs, CPU slices and simulated devices. Their common parts are here.
One selects devices by the rules of CUDA_VISIBLE_DEVICES, which other makers' variables follow too.
Another reads a device's vitals, which reveal whatever can spoil a measurement: throttling, memory
that other programs use, or a driver that stops answering. docs/architecture.md, "To add a maker of
devices", lists what a new maker needs.
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
    """All devices of one kind that a driver lists, and notes on devices that don't answer."""

    devices: tuple[Device, ...]
    used_bytes: dict[str, int | None] = {}  # memory in use now, by device id
    notes: tuple[str, ...] = ()
    driver: str = ""  # the driver's version; empty if it doesn't report one


class Discovery(msgspec.Struct, frozen=True):
    """The devices that a request selects, with notes for the user."""

    devices: tuple[Device, ...]
    # messages for the user, such as what `auto` chose and why, or that others use a device
    notes: tuple[str, ...] = ()
    machine: Machine | None = None  # the simulated machine, if the devices are simulated
    driver: str = ""  # version of the devices' driver


def choose_devices(
    listing: Listing, terms: Sequence[Term], visible: Sequence[Device], hidden: str
) -> Discovery:
    """Return the devices that the terms name, in the terms' order.

    A term without an index or id selects all `visible` devices. Notes name devices that have more
    than 5 % of their memory in use by other programs. Raises DeviceError if no device is visible.
    `hidden` is the setting that hides them, for the message.
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
    """Return the device with this index, id or unique prefix of an id.

    Raises RequestError, which lists the available devices, unless exactly one device matches.
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
    """Return the devices that CUDA_VISIBLE_DEVICES or a similar variable allows, in its order.

    `variable` is the variable's value; None, if it isn't set, allows all devices. Its entries are
    indices or prefixes of ids. An entry that matches no device ends the list. If a device is named
    twice, no device is visible.
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
    """One reading of a device's condition. A field is None if the device doesn't report it.

    Durations (`*_seconds`) are cumulative since the driver was loaded or the reader was created.
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
    """Reads the vitals of one device through its maker's library.

    It isn't thread-safe: only one thread may call it at a time.
    """

    def read(self, full: bool) -> Vitals:
        """Return one reading; memory, processes and load are read only if `full`.

        A full reading takes longer. A failure of the driver isn't raised but returned as the
        reading's `trouble`.
        """

    def close(self) -> None:
        """Release the driver. May be called more than once."""


class VitalsWatch:
    """Reads one device's vitals in the background, so that a hanging driver blocks no caller.

    Each reading has its own thread. Until the driver has answered once, the vitals are empty, and
    failures aren't reported. After that, the field `trouble` reports them.
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
        """Start another reading; `full` is as in `VitalsReader.read`.

        Return False and do nothing if the driver hasn't answered the previous reading yet, or if
        `close` has been called.
        """
        if self.pending or self._closed:
            return False
        self._start(self._answer, full)
        return True

    def answer(self, until: float = 0.0) -> Vitals:
        """Return the driver's latest answer.

        If a reading is pending, first wait for it, at most until the monotonic clock reads `until`
        (in seconds). The default is not to wait.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._last

    @property
    def pending(self) -> bool:
        """True while the driver hasn't answered the last reading that was started."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_seconds(self) -> float:
        """The seconds since the driver was asked; 0 if no reading is pending.

        Time that the reading's thread spent waiting for a free CPU doesn't count.
        """
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Stop reading, without waiting for the driver.

        If a call is pending, a background thread closes the reader once the driver has answered.
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
    """The settings that restrict a child process to its own devices.

    The limit `address_space_bytes` is set by the child itself, which calls `cap_address_space`.
    """

    variables: dict[str, str]  # to set; the rest of the environment is inherited
    cores: tuple[int, ...] = ()  # for os.sched_setaffinity; empty: not set
    # bytes by which the child may grow after importing the framework; None: no limit
    address_space_bytes: int | None = None
    threads: int | None = None  # compute threads; None: the framework's own choice


class Backend(Protocol):
    """The base class of backends; a backend implements one kind of devices.

    A maker's class overrides the methods that its devices support. A process has one instance of
    each class, which `devices/registry.py` creates. Importing a backend's module must not start a
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
        """Return every device of this kind on this machine.

        Raises DeviceError if there is none, or if the driver fails.
        """
        raise DeviceError(f"This machine can't list devices of the kind {self.kind}.")

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """Return the devices that the terms name, in the terms' order, with notes.

        The environment `variables` may hide some devices. Raises DeviceError if this machine has no
        such devices or all are hidden, and RequestError if a named device doesn't exist.
        """
        listing = self.list_devices()
        hidden = f"{self.visible_variable}={variables.get(self.visible_variable)!r}"
        return choose_devices(listing, terms, self.visible(listing.devices, variables), hidden)

    def has_started_driver(self, files: Collection[str]) -> bool:
        """True if this process has started the driver to compute, so it can't be forked.

        `files` are the names of all files that it has open. By default, a process that has any of
        the driver's files open has started it.
        """
        return any(name.startswith(self.driver_files) for name in files)

    def visible(
        self, devices: Sequence[Device], variables: Mapping[str, str]
    ) -> tuple[Device, ...]:
        """Return those of `devices` that a process with these environment variables sees.

        The maker's variable, such as CUDA_VISIBLE_DEVICES, also determines the order of the result.
        """
        return visible_devices(devices, variables.get(self.visible_variable))

    def write_term(self, device_id: str) -> str:
        """Return the term that names a plan's device in `--devices`.

        Usually, it is `device_id`, the device's id in the plan. Raises DeviceError for a device
        that can't train.
        """
        return device_id

    def open_source(self, discovery: Discovery) -> Source:
        """Return a source that samples these devices for the monitor.

        Raises DeviceError if the driver has gone since the devices were found.
        """

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """Return the environment of a child process that uses only these devices.

        `framework` is "tensorflow", "torch" or "none". Raises DeviceError if a limit of the devices
        can't be enforced.
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
        """Return the environment variables that make only the devices with these ids visible.

        A process then sees the devices in this order.
        """
        return {self.visible_variable: ",".join(ids)} if self.visible_variable else {}

    def show_by_number(self, devices: Sequence[Device]) -> dict[str, str]:
        """Return the variables of `show`, with the devices' numbers instead of ids where possible.

        This is for libraries, such as DeepSpeed, that can't read ids.
        """
        return self.show([device.id for device in devices])

    def name_in(self, framework: str, number: int) -> str:
        """Return the framework's name for a device, such as "cuda:0" or "GPU:0".

        `number` is the device's index among the devices that the child process sees.
        """
        words = {"torch": self.torch_name, "tensorflow": self.tensorflow_name}
        return f"{words.get(framework) or self.kind.upper()}:{number}"

    def open_vitals(self, device: Device) -> VitalsReader | None:
        """Return a reader of a device's vitals; None if this kind of devices has none.

        Probes read vitals between their timed blocks.
        """
        return None

    def name_path(self, first: Device, second: Device) -> str:
        """Return the name of the data path between two devices of this kind, such as "NVLink".

        Return "" if the path is unknown.
        """
        return ""

    def bus_address(self, device: Device) -> str:
        """Return the device's PCI address in sysfs notation, such as 0000:3b:00.0.

        Return "" if the device has no address of its own, or if the address is unknown.
        """
        # sessions lock the sysfs file at this address, so that different users don't measure on the
        # device at the same time
        return ""

    def daemon_runs(self) -> bool:
        """True if a daemon is running that lets processes share a device, such as NVIDIA's MPS."""
        return False
