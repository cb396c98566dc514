"""Metrics for Prometheus: valid, current, with dcgm-exporter's names, and only for this machine by
default.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from evener.devices.simulated import SimulatedSource
from evener.devices.types import DENIED, LOST, Reading, State
from evener.errors import RequestError
from evener.live.files import LiveDevice, LiveRecord, Training
from evener.tui.cli.main import run
from evener.tui.cli.monitor import _snapshots

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from evener.devices.network import Address, is_loopback
from evener.tui.serve import metrics
from evener.tui.serve.metrics import metric_families, parse_metrics_address, serving_metrics

ROOT = Path(__file__).parents[2]
Found = dict[str, dict[str, float]]  # metric -> UUID, or rank -> value
RANKS = [
    LiveRecord(
        "torch",
        'odd "name"\\',
        900.0,
        7,
        1.79e9,
        (LiveDevice("gpu-0", 0, 768, 900.0, 384, 0.11, 0.02),),
        training="t1",
        rank=0,
        world=2,
        step_s=0.2,
        input_s=0.01,
        plan_samples_per_second=2000.0,
    ),
    LiveRecord(
        "torch",
        "bert",
        700.0,
        7,
        1.79e9,
        (LiveDevice("gpu-1", 1, 560, 700.0, 560, 0.13, 0.0),),
        tokens_per_second=3e4,
        padding=0.25,
        training="t1",
        rank=1,
        world=2,
        step_s=0.2,
    ),
    LiveRecord("keras", "mnist", 0.0, 3, 1.79e9, ()),
]


def _trainings() -> list[Training]:
    """Return trainings, of which the last is an earlier report under the first one's name."""
    reports = [*RANKS, msgspec.structs.replace(RANKS[0], updated_at=1.78e9, step=2)]
    return [
        Training(**msgspec.structs.asdict(each), pid=50 + place)
        for place, each in enumerate(reports)
    ]


def _registry(snapshot: Any) -> CollectorRegistry:
    class Once:
        def collect(self) -> Iterator[Any]:
            return metric_families(msgspec.structs.replace(snapshot, reports=tuple(_trainings())))

    registry = CollectorRegistry()
    registry.register(Once())
    return registry


def _by_label(text: str, label: str) -> Found:
    found: Found = {}
    for family in parse_plain(text):
        for sample in family.samples:
            if label in sample.labels:
                found.setdefault(sample.name, {})[sample.labels[label]] = sample.value
    return found


# differ from response to response
AGES = ("evener_report_age_seconds", "evener_report_late_seconds")


def test_both_formats_are_valid_and_have_the_same_samples(script: Any) -> None:
    registry = _registry(script.snapshot())
    plain = [
        (each.name, each.labels, each.value)
        for family in parse_plain(generate_latest(registry).decode())
        for each in family.samples
        if each.name not in AGES
    ]
    open_text = generate_open(registry).decode()
    strict = [(each.name, each.labels, each.value) for family in parse_open(open_text)
              for each in family.samples if each.name not in AGES]  # fmt: skip
    assert plain == strict
    assert len({(name, *sorted(labels.items())) for name, labels, _ in plain}) == len(plain)


def test_devices_have_dcgm_exporters_names_units_and_labels(script: Any) -> None:
    text = generate_latest(_registry(script.snapshot())).decode()
    found = _by_label(text, "UUID")
    assert found["DCGM_FI_DEV_GPU_UTIL"] == {"gpu-0": 98, "gpu-1": 92}
    assert found["DCGM_FI_DEV_POWER_USAGE"] == {"gpu-0": 640, "gpu-1": 631}
    assert found["DCGM_FI_DEV_FB_USED"] == {"gpu-0": 62 * 1024, "gpu-1": 63 * 1024}  # MiB
    assert found["DCGM_FI_PROF_SM_ACTIVE"] == {"gpu-0": 0.87, "gpu-1": 0.86}
    assert found["evener_throttled_ratio"]["gpu-1"] == 0.12
    one = next(
        each
        for family in parse_plain(text)
        for each in family.samples
        if each.name == "DCGM_FI_DEV_GPU_TEMP"
    )
    assert one.labels == {
        "gpu": "0",
        "UUID": "gpu-0",
        "device": "nvidia0",
        "modelName": "NVIDIA H200",
        "Hostname": "node7",
    }


def test_a_figure_that_isnt_current_has_no_sample(script: Any) -> None:
    samples = (
        script.sample(0, power_watts=DENIED, temperature_celsius=Reading(State.STALE, 50.0, 9.0)),
        script.sample(1, utilization_percent=LOST),
    )
    found = _by_label(generate_latest(_registry(script.snapshot(devices=samples))).decode(), "UUID")
    assert found["DCGM_FI_DEV_POWER_USAGE"] == {"gpu-1": 631}
    assert found["DCGM_FI_DEV_GPU_TEMP"] == {"gpu-1": 62}
    assert found["DCGM_FI_DEV_GPU_UTIL"] == {"gpu-0": 98}
    assert found["evener_device_lost"] == {"gpu-0": 0, "gpu-1": 1}
    assert "DCGM_FI_DEV_FAN_SPEED" not in found


def test_each_rank_of_a_training_has_its_own_work_waiting_and_share(script: Any) -> None:
    text = generate_latest(_registry(script.snapshot())).decode()
    ranks = _by_label(text, "rank")
    assert ranks["evener_samples_per_second"] == {"0": 900, "1": 700, "": 0}
    assert ranks["evener_share_rows"] == {"0": 768, "1": 560}
    assert ranks["evener_micro_rows"] == {"0": 384, "1": 560}
    assert ranks["evener_own_work_seconds"] == {"0": 0.11, "1": 0.13}
    assert ranks["evener_wait_seconds"] == {"0": 0.02, "1": 0.0}
    assert ranks["evener_plan_samples_per_second"] == {"0": 2000}
    assert ranks["evener_tokens_per_second"] == {"1": 3e4}
    assert ranks["evener_steps_total"] == {"0": 7, "1": 7, "": 3}
    assert set(_by_label(text, "workload")["evener_samples_per_second"]) == {
        'odd "name"\\',
        "bert",
        "mnist",
    }


def test_ranks_on_other_hosts_carry_their_names(script: Any) -> None:
    """Two processes without an id may have the same pid on two hosts. Both are there."""
    here = Training(**msgspec.structs.asdict(RANKS[1]) | {"training": "", "rank": -1}, pid=50)
    there = msgspec.structs.replace(
        here,
        devices=(msgspec.structs.replace(here.devices[0], host="10.0.0.2"),),
        samples_per_second=5.0,
    )
    families = metric_families(script.snapshot(reports=(here, there)))
    (speeds,) = (family for family in families if family.name == "evener_samples_per_second")
    assert {each.labels["Hostname"]: each.value for each in speeds.samples} == {
        "node7": 700.0,
        "10.0.0.2": 5.0,
    }


def _ask(port: int, host: str = "", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_server_gives_the_newest_reading_to_this_machine_alone(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    readings: list[Any] = []
    with serving_metrics(Address("127.0.0.1", 0), lambda: readings[-1] if readings else None):
        address = parse_metrics_address(capsys.readouterr().err.split("/")[2], public=False)
        assert _ask(address.port) == (200, "")
        for watts in (100, 200):
            sample = script.sample(power_watts=Reading(State.VALUE, watts))
            readings.append(script.snapshot(devices=(sample,), reports=tuple(_trainings())))
            status, text = _ask(address.port)
            assert status == 200
            assert _by_label(text, "UUID")["DCGM_FI_DEV_POWER_USAGE"] == {"gpu-0": watts}
            assert _by_label(text, "training")["evener_samples_per_second"].keys() == {"t1", "52"}
        for host in (
            "evil.example",
            f"evil.example:{address.port}",
            "127.0.0.1.evil.example",
            "[::1",
            "10.0.0.1",
        ):
            assert _ask(address.port, host)[0] == 403, host
        for host in (f"localhost:{address.port}", "127.0.0.1", "[::1]:9401"):
            assert _ask(address.port, host)[0] == 200, host
        with (
            pytest.raises(RequestError, match=r"can't be served.*in use"),
            serving_metrics(address, lambda: None),
        ):
            pass
    with pytest.raises(ConnectionRefusedError):
        _ask(address.port)


@pytest.mark.parametrize(
    "address", ["9401", "gpu7:9401", "127.0.0.1", "127.0.0.1:70000", "a@127.0.0.1:1", "[::1:2", ""]
)
def test_an_invalid_address_is_a_one_line_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["monitor", "-d", "sim:gtx1080", f"--metrics={address}"]) == 2
    assert re.fullmatch(
        r"evener: --metrics .* is not an address\. Give .*\n", capsys.readouterr().err
    )


def test_others_are_served_only_if_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("0.0.0.0:0", "10.0.0.7:9401", "[::]:9401"):
        assert run(["monitor", "-d", "sim:gtx1080", "--metrics", address]) == 2
        assert "reads this machine's name" in capsys.readouterr().err
        assert parse_metrics_address(address, public=True)
    assert parse_metrics_address("[::1]:9401", public=False).authority == "[::1]:9401"
    assert run(["monitor", "-d", "sim:gtx1080", "--metrics-public"]) == 2
    assert run(["monitor", "-d", "sim:gtx1080", "--once", "--metrics", "127.0.0.1:0"]) == 2
    assert not is_loopback("0.0.0.0:80")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "evener.tui.serve.metrics")
    assert run(["monitor", "-d", "sim:gtx1080", "--metrics", "127.0.0.1:0"]) == 2
    assert capsys.readouterr().err == (
        "evener: Metrics need prometheus-client. Install it: pip install 'evener[metrics]'.\n"
    )


def test_the_dashboard_asks_for_metrics_that_are_served(script: Any) -> None:
    served = {
        each.name
        for family in parse_plain(generate_latest(_registry(script.snapshot())).decode())
        for each in family.samples
    }
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {
        name for expression in asked for name in re.findall(r"\b(?:DCGM_FI|evener)_\w+", expression)
    }
    assert len(panels) >= 8
    assert len(named) >= 10
    unknown = named - served
    assert not unknown


@pytest.mark.parametrize("on_terminal", [False, True])
def test_metrics_are_served_while_the_monitor_runs(on_terminal: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "evener",
        "monitor",
        "-d",
        "sim:gtx1080",
        "--metrics",
        "127.0.0.1:0",
    ]
    primary, secondary = os.openpty()
    stream = secondary if on_terminal else subprocess.DEVNULL
    with subprocess.Popen(
        command,
        stdin=stream,
        stdout=stream,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm-256color"},
    ) as child:
        os.close(secondary)
        draining = threading.Thread(target=_drain, args=(primary,), daemon=True)
        draining.start()
        assert child.stderr is not None
        said = child.stderr.readline().decode()
        port = int(re.fullmatch(r"evener: metrics at http://127\.0\.0\.1:(\d+)/metrics\n", said)[1])  # type: ignore[index]
        while not (text := _ask(port)[1]):
            assert child.poll() is None
        child.terminate()
        child.stderr.read()
    assert "sim-0-gtx1080" in _by_label(text, "UUID")["DCGM_FI_DEV_GPU_UTIL"]
    draining.join(30)


def _drain(descriptor: int) -> None:
    with suppress(OSError):
        while os.read(descriptor, 65536):
            pass
    os.close(descriptor)


def _first_port(capsys: pytest.CaptureFixture[str]) -> int:
    return parse_metrics_address(capsys.readouterr().err.split("/")[2], public=False).port


def test_silent_clients_keep_no_other_out_and_no_descriptors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each could hold a thread and a descriptor, so the oldest are closed."""
    monkeypatch.setattr(metrics, "MOST_CLIENTS", 8)
    with serving_metrics(Address("127.0.0.1", 0), lambda: None), ExitStack() as open_ones:
        port = _first_port(capsys)
        clients = []
        for _ in range(100):
            clients.append(open_ones.enter_context(_connect(port)))
            assert len(_connections_to(port)) <= 9  # one of them waits for room
        assert _ask(port) == (200, "")
        assert [client.recv(1) for client in clients[:92]] == [b""] * 92
        assert len(_connections_to(port)) <= 8


def test_a_whole_request_has_a_time_however_slowly_it_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.5)
    with (
        serving_metrics(Address("127.0.0.1", 0), lambda: None),
        _connect(_first_port(capsys)) as client,
        suppress(ConnectionError),
    ):
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        client.settimeout(0.1)
        until = time.monotonic() + 60
        while _is_open(client):
            assert time.monotonic() < until, "it holds its thread for ever"
            client.sendall(b"x")


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def _is_open(client: socket.socket) -> bool:
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True


def _connections_to(port: int) -> list[Any]:
    """Return this process's ends of the connections that the server has accepted."""
    found = psutil.Process().net_connections("tcp")
    return [each for each in found if each.laddr.port == port and each.status != "LISTEN"]


def test_a_reading_that_fails_is_stale_and_not_the_end(script: Any) -> None:
    """A reading fails, for example, without a free descriptor for /proc/stat."""
    sample = script.sample(power_watts=Reading(State.VALUE, 100.0))
    whole = script.snapshot(devices=(sample,))
    answers = iter([whole, whole, OSError(24, "Too many open files"), whole])

    class Failing:
        def devices(self) -> tuple[Any, ...]:
            return ()

        def sample(self) -> Any:
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer

    readings = islice(_snapshots(Failing(), 0.0, repeat=True), 3)  # type: ignore[arg-type]
    first, failed, last = (next(readings) for _ in range(3))
    assert first == last == whole
    assert failed.devices[0].power_watts.state is State.STALE
    assert "Too many open files" in failed.notes[-1]


def test_a_reading_that_fails_at_once_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(SimulatedSource, "sample", fail)
    assert run(["monitor", "-d", "sim:gtx1080", "--once"]) == 3
    assert "can't be read: Too many open files." in capsys.readouterr().err
