"""The questions that evener asks of a kind of devices; NVIDIA's GPUs, CPU slices and simulated devices answer them.

docs/architecture.md, "To add a maker of devices", says which file to write and which line to add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from evener.errors import DeviceError

from .listing import Discovery, Listing, choose_devices
from .types import Device, Source, Term
from .vitals import VitalsReader

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}  # for children: frameworks write less


class ChildEnvironment(msgspec.Struct, frozen=True):
    """A child's start on its devices; the child applies `address_space_bytes` itself, by `cap_address_space`."""

    variables: dict[str, str]  # to set; the rest of the environment is inherited
    cores: tuple[int, ...] = ()  # for os.sched_setaffinity; empty: leave it
    address_space_bytes: int | None = None  # room to grow, counted from when the framework is imported; None: no cap
    threads: int | None = None  # compute threads; None: the framework's own choice


class SharingDaemon(Protocol):
    """A daemon of evener's own, by which processes compute on one device at the same time, as NVIDIA's MPS does."""

    def variables(self) -> dict[str, str]:
        """The variables that lead a child to the daemon, which is started if needed; DeviceError if it can't start."""

    def close(self) -> None:
        """End the daemon; it may be called twice."""


class Backend(Protocol):
    """One kind of devices; a maker's class inherits it and overrides what its devices have.

    A process has one object of each class, made by `devices/registry.py`: importing its module starts no driver.
    """

    kind: str  # the word in `--devices`, in labels (GPU:0) and in `Device.kind`; lower case letters and digits
    maker: str = ""  # the name that people know; empty: no maker's driver is asked
    own_memory: bool = True  # False: devices share the host's memory, or are simulated
    simulated: bool = False
    id_prefixes: tuple[str, ...] = ()  # lower case: what begins so in `--devices` is the id of such a device
    visible_variable: str = ""  # names the devices that a process may use; a child of another kind gets it empty
    late_variables: tuple[str, ...] = ()  # prefixes of those that the driver reads after a framework is imported
    driver_files: tuple[str, ...] = ()  # parts of the names of files that a process has open once its driver runs
    device_words: tuple[str, ...] = ()  # lower case: its libraries; an error that names one may be one device's own
    memory_words: tuple[str, ...] = ()  # lower case: an error that says one means that memory ran out
    torch_name: str = ""  # PyTorch's word for these devices: "cuda"
    tensorflow_name: str = ""  # TensorFlow's: "GPU"
    check_module: str = "evener.errors"  # `python -m` exits with 0 if the first visible one computes
    remedy: str = "Check the driver and dmesg."  # for devices that don't compute
    double_packages: tuple[tuple[str, str], ...] = ()  # (one, another that evener needs) with the same module
    settle_seconds: float = 0.05  # from a source's first sample to one with rates
    daemon_program: str = ""  # the program of the sharing daemon; empty: there is none

    def list_devices(self) -> Listing:
        """Every device of this kind that this machine has; DeviceError if there is none or its driver fails."""
        raise DeviceError(f"This machine can't list devices of the kind {self.kind}.")

    def find(self, terms: Sequence[Term], variables: Mapping[str, str]) -> Discovery:
        """The devices that the terms name, in their order, with notes; the environment `variables` may hide some.

        DeviceError: there are none, or all are hidden. RequestError: one that is named isn't there.
        """
        return choose_devices(self.list_devices(), terms, self.visible_variable, variables)

    def open_source(self, found: Discovery) -> Source:
        """A source that samples these devices for the monitor; DeviceError if the driver has gone since."""

    def child_environment(self, devices: Sequence[Device], framework: str) -> ChildEnvironment:
        """A child's start on these devices alone with "tensorflow", "torch" or "none"; DeviceError if it can't be."""
        for device in devices:
            if device.limit.percent:
                message = f"{device.label} can't be held to {device.limit.percent:g} %: nothing here does that."
                raise DeviceError(message, "Omit the percentage.")
        return ChildEnvironment({**QUIET, **self.show([device.id for device in devices])})

    def show(self, ids: Sequence[str]) -> dict[str, str]:
        """The variables by which a process sees the devices with these ids, in this order, and no other."""
        return {self.visible_variable: ",".join(ids)} if self.visible_variable else {}

    def name_in(self, framework: str, number: int) -> str:
        """The name of a child's device with this number in its framework: "cuda:0", "GPU:0"."""
        words = {"torch": self.torch_name, "tensorflow": self.tensorflow_name}
        return f"{words.get(framework) or self.kind.upper()}:{number}"

    def open_vitals(self, device: Device) -> VitalsReader | None:
        """A reader that a probe asks between its timed blocks; None: nothing is known of such devices."""
        return None

    def bus_address(self, device: Device) -> str:
        """The PCI address as sysfs writes it, like 0000:3b:00.0: its file is locked between users; empty: none is."""
        return ""

    def daemon_runs(self) -> bool:
        """True if a sharing daemon that evener didn't start runs already."""
        return False

    def open_daemon(self) -> SharingDaemon:
        """A sharing daemon, which starts when its variables are asked for."""
        raise DeviceError(f"Devices of the kind {self.kind} have no daemon to share them.", "Omit --mps.")
