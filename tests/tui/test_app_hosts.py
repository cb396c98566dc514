"""A cluster in the app: hosts as groups that fold, a lost host, processes that can't be signalled
from here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from evener.devices.processes import send_signal
from evener.devices.types import LOST, Device, Snapshot
from evener.errors import RequestError
from evener.tui.screens.monitor import DevicePanel
from evener.tui.text.parsing import select_devices
from evener.tui.view.devices import HostRow, device_rows, draw_host, group_rows
from tests.support.pilots import text, until
from tests.support.tables import device_lines

BIG, SMALL = "10.0.0.1", "10.0.0.2"


def over_hosts(script: Any, *, lost: bool = False) -> Snapshot:
    """Return two devices on one host and one on another, which may be lost; a process on
    each host.
    """
    devices = [
        msgspec.structs.replace(script.device(index), host=host)
        for index, host in ((0, BIG), (1, BIG), (0, SMALL))
    ]
    samples = [script.sample(device.index, device=device) for device in devices]
    if lost:
        gone = {"utilization_percent": LOST, "memory_used_bytes": LOST, "samples_per_second": LOST}
        samples[2] = msgspec.structs.replace(
            samples[2], note=f"its host {SMALL} has left the cluster", **gone
        )
    processes = [
        script.process(4000 + i, device_label=f"{host}/GPU:0", host=host)
        for i, host in enumerate((BIG, SMALL))
    ]
    found: Snapshot = script.snapshot(devices=tuple(samples), processes=tuple(processes))
    return found


def test_devices_stand_below_their_hosts(script: Any) -> None:
    rows = group_rows(device_rows(over_hosts(script)), {BIG})
    first, second, device = rows
    assert isinstance(first, HostRow)
    assert (first.host, len(first.rows), first.folded) == (BIG, 2, True)
    assert isinstance(second, HostRow)
    assert (second.host, second.folded) == (SMALL, False)
    assert device is second.rows[0]
    assert "GPU:0" in device_lines((device,), 80, 3)[0][1].text
    assert SMALL not in device_lines((device,), 80, 3)[0][1].text
    assert draw_host(first, 80, False).text.startswith(
        f" ▶ {BIG} 2 devices 95 % busy · 125 GiB used · "
    )
    assert draw_host(second, 30, False).text == f" ▼ {SMALL} 1 device 98 % bus…"
    alone = device_rows(script.snapshot())
    assert group_rows(alone, {""}) == alone


async def test_a_host_folds_and_a_lost_one_says_why(app_of: Any, script: Any) -> None:
    app = app_of(over_hosts(script, lost=True))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: BIG in text(app, "#devices"), "the first snapshot")
        lines = text(app, "#devices").splitlines()
        assert [
            word in line
            for word, line in zip(
                ("▼ 10", "GPU:0", "GPU:1", "▼ 10", "GPU:0"), lines[2:], strict=False
            )
        ]
        assert any(
            f"{SMALL} 1 device its host {SMALL} has left the cluster" in line for line in lines
        )
        await until(
            pilot,
            lambda: "▸GPU:0" in text(app, "#graphs"),
            "the host's first device",
        )
        await pilot.press("enter")
        assert app.screen.query_one(DevicePanel).count == 3
        assert "GPU:1" not in text(app, "#devices")
        await pilot.press("enter")
        assert app.screen.query_one(DevicePanel).count == 5
        await pilot.press("j", "j")
        await until(
            pilot,
            lambda: "▸GPU:1" in text(app, "#graphs"),
            "the graphs follow",
        )


def test_processes_of_other_hosts_are_out_of_reach(script: Any) -> None:
    process = over_hosts(script).processes[1]
    with pytest.raises(RequestError, match=f"Process 4001 runs on {SMALL}"):
        send_signal(process, "INT")


def test_chosen_devices_of_hosts_are_named_as_the_command_line_does() -> None:
    devices = [
        Device(f"GPU-{i}", i, "H200", "gpu", 1, host=host)
        for host, i in ((BIG, 0), (BIG, 1), (SMALL, 0))
    ]
    assert select_devices("ray", devices, (0, 1, 2)) == "ray"
    assert select_devices("ray", devices, (1, 2)) == f"ray:{BIG}/GPU-1,ray:{SMALL}/GPU-0"
    slices = [Device("cpu-1-of-2", 1, "EPYC", "cpu", 1, host=host) for host in (BIG, SMALL)]
    assert select_devices("ray", slices, (1,)) == f"ray:{SMALL}/cpu/2:1"
