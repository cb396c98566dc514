"""Translates device names between TensorFlow, the driver, the plan and the user."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import DeviceError, RequestError
from ..plan.file import Plan, Share

# The plan numbers GPUs as the driver does; by default, CUDA puts the fastest first. CUDA reads this
# when it starts.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

import tensorflow as tf


def name_plan_devices(plan: Plan) -> tuple[str, ...]:
    """Return TensorFlow's names of the plan's devices.

    Unless all devices are GPUs, create logical CPUs and return their names instead. Raises
    DeviceError if a GPU isn't visible.
    """
    active = plan.layout.active
    if all(share.on_gpu for share in active):
        visible = _list_visible_gpus()
        return tuple(f"GPU:{_find_visible_index(share, visible)}" for share in active)
    make_logical_cpus(len(active))
    return tuple(f"CPU:{i}" for i in range(len(active)))


def name_gpus(gpus: int | Sequence[int]) -> tuple[str, ...]:
    """Return the names of GPUs, such as "GPU:0", for a number of GPUs or a list of indices.

    A number stands for the first GPUs. Raises RequestError if there are none.
    """
    numbers = list(range(gpus)) if isinstance(gpus, int) else list(gpus)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise RequestError(
            f"gpus={gpus!r} names no GPU.", "Give a number of GPUs, or a list of them: gpus=[0, 1]."
        )
    return tuple(f"GPU:{n}" for n in numbers)


def name_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Return TensorFlow's short names of the devices, such as "GPU:0".

    Raises RequestError if `devices` is empty or isn't a list of names.
    """
    if (
        isinstance(devices, str)
        or not devices
        or not all(isinstance(name, str) for name in devices)
    ):
        raise RequestError(
            f"devices={devices!r} names no devices.", 'Give a list: devices=["GPU:0", "GPU:1"].'
        )
    return tuple(short_name(name.upper()) for name in devices)


def check_present(names: Sequence[str]) -> None:
    """Raise DeviceError if TensorFlow doesn't see one of the devices.

    Raises RequestError if a device is named twice.
    """
    if len(set(names)) != len(names):
        raise RequestError(f"{', '.join(names)} names a device twice.", "Name each device once.")
    present = [short_name(device.name) for device in tf.config.list_logical_devices()]
    missing = [name for name in names if name not in present]
    if missing:
        cpus = [
            int(name[4:]) + 1
            for name in missing
            if name.startswith("CPU:") and name[4:].isdecimal()
        ]
        raise DeviceError(
            f"TensorFlow sees no {', '.join(missing)} here, only {', '.join(present)}.",
            f"Call evener.keras.make_logical_cpus({max(cpus)}) at the start of the script."
            if len(cpus) == len(missing)
            else "Make a plan on this machine with evener balance, or run evener doctor.",
        )


def compare_gpus(names: Sequence[str], plan: Plan) -> list[str]:
    """Return a sentence for each GPU whose product name differs from the plan's."""
    gpus = {
        short_name(gpu.name).removeprefix("physical_device:"): gpu
        for gpu in tf.config.list_physical_devices("GPU")
    }
    found = []
    for name, share in zip(names, plan.layout.active, strict=True):
        here = (
            tf.config.experimental.get_device_details(gpus[name]).get("device_name")
            if name in gpus
            else None
        )
        if here and here not in share.name and share.name not in here:
            found.append(f"The plan's {name} is a {share.name}, this machine's a {here}.")
    return found


def short_name(name: str) -> str:
    """Shorten TensorFlow's name of a device, "/job:localhost/device:GPU:0", to the form "GPU:0"."""
    return name.rpartition("/")[2].removeprefix("device:").removeprefix("DEVICE:")


def driver_name(name: str) -> str | int:
    """Return the driver's index or UUID of a GPU, given TensorFlow's name, such as "GPU:0".

    For "CPU:0", the result is "cpu:0".
    """
    kind, _, number = name.partition(":")
    if kind != "GPU":
        return name.lower()
    visible = _list_visible_gpus()
    entry = number if visible is None or int(number) >= len(visible) else visible[int(number)]
    return int(entry) if entry.isdecimal() else entry


def make_logical_cpus(count: int) -> None:
    """Divide TensorFlow's CPU into `count` logical devices, unless it is already divided.

    Raises DeviceError if TensorFlow has started. Does nothing if `count` is below 2.
    """
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    if count < 2 or tf.config.get_logical_device_configuration(cpu):
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:
        raise DeviceError(
            f"TensorFlow has already started, so its CPU can't become {count} devices.",
            "Make the Split, or call make_logical_cpus, before the first tensor or model.",
        ) from None


def _list_visible_gpus() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, or None if it isn't set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


def _find_visible_index(share: Share, visible: list[str] | None) -> int:
    """Return TensorFlow's index of the share's GPU: its position among the visible GPUs.

    `visible` has the entries of CUDA_VISIBLE_DEVICES, or is None if all GPUs are visible. Raises
    DeviceError if the GPU isn't visible.
    """
    if visible is None:
        return share.index
    for position, entry in enumerate(visible):
        if entry == str(share.index) or (
            entry.upper().startswith(("GPU-", "MIG-")) and share.device.startswith(entry)
        ):
            return position
    raise DeviceError(
        f"The plan's GPU {share.index} ({share.name}) isn't among "
        f"CUDA_VISIBLE_DEVICES={','.join(visible)}.",
        "Add it, or make a plan for the GPUs that are.",
    )
