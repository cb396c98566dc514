"""Serve readings of devices and training runs as metrics for Prometheus.

Metrics of devices have the names and labels of NVIDIA's dcgm-exporter. The names of training
metrics begin with `evener_`. Values that are unknown or out of date are left out.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from evener.devices.network import Address, is_loopback, parse_address
from evener.devices.registry import find_backend
from evener.devices.types import Device, DeviceSample, Snapshot, State
from evener.errors import RequestError, as_request_error
from evener.live.files import LiveDevice, Training, clean
from evener.training.noise_scale import ENDLESS

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
    from prometheus_client.exposition import ThreadingWSGIServer
    from prometheus_client.metrics_core import Metric
except ImportError:
    raise RequestError(
        "Metrics need prometheus-client.", "Install it: pip install 'evener[metrics]'."
    ) from None

MOST_CLIENTS = 64  # maximum number of simultaneous connections
REQUEST_SECONDS = 10.0  # seconds from a connection to the end of its response
CUT_SECONDS = 0.1  # seconds between checks whether a connection that was cut off is closed
WHAT_IS_SERVED = (
    "this machine's name, its devices and their load, and the names and speed of your trainings"
)


class _ReadingCollector:
    """Prometheus collector that returns the metrics of the latest reading.

    `latest` returns this reading, or None before the first one.
    """

    def __init__(self, latest: Callable[[], Snapshot | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Any]:
        """Return the metrics of the latest reading, or none before the first one."""
        snapshot = self._latest()
        return () if snapshot is None else metric_families(snapshot)


class _Clients:
    """The server's open connections, limited in number and duration. Thread-safe."""

    def __init__(self) -> None:
        self._since: dict[socket.socket, float] = {}  # monotonic seconds
        self._cut: set[socket.socket] = set()  # shut down; their threads will close them
        self._change = threading.Condition()

    def add(self, client: socket.socket) -> None:
        """Add a connection. If 64 are open already, the oldest one is cut off first."""
        # Requests are answered within milliseconds, so the oldest connection only blocks others.
        with self._change:
            while len(self._since) >= MOST_CLIENTS:
                oldest = next((each for each in self._since if each not in self._cut), None)
                if oldest is not None:
                    self._cut_off(oldest)
                self._change.wait(CUT_SECONDS)
            self._since[client] = time.monotonic()

    def close(self, client: socket.socket, close: Callable[[socket.socket], None]) -> None:
        """Remove a connection and close it by calling `close`."""
        # Without the lock, another thread could shut the connection down afterwards, when its
        # descriptor may already belong to another connection.
        with self._change:
            self._since.pop(client, None)
            self._cut.discard(client)
            close(client)
            self._change.notify_all()

    def cut_off_late(self) -> None:
        """Cut off connections that are older than 10 seconds."""
        until = time.monotonic() - REQUEST_SECONDS
        with self._change:
            for client, since in self._since.items():
                if since <= until and client not in self._cut:
                    self._cut_off(client)

    def _cut_off(self, client: socket.socket) -> None:
        self._cut.add(client)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS  # seconds without receiving a byte

    def log_message(self, *_: object) -> None:
        """Do nothing, so that requests aren't logged."""


class _Server4(ThreadingWSGIServer):
    request_queue_size = 16

    def __init__(self, *given: Any) -> None:
        self._clients = _Clients()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Register a new connection, and answer its request in a thread."""
        self._clients.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection after its response."""
        self._clients.close(request, super().shutdown_request)

    def service_actions(self) -> None:
        """Cut off connections that have been open for too long.

        The server's loop calls this regularly.
        """
        self._clients.cut_off_late()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print unexpected exceptions; broken connections are ignored."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Server6(_Server4):
    address_family = socket.AF_INET6


def parse_metrics_address(text: str, public: bool) -> Address:
    """Parse an address of the form HOST:PORT.

    Raises RequestError if it is invalid, or if other machines can reach it and `public` is False.
    """
    address = parse_address(text, "--metrics")
    if not public and not is_loopback(address.authority):
        raise RequestError(
            f"--metrics {text} can be reached from other machines.",
            f"Anybody who reaches it reads {WHAT_IS_SERVED}. Add --metrics-public to allow that.",
        )
    return address


@contextmanager
def serving_metrics(address: Address, latest: Callable[[], Snapshot | None]) -> Iterator[None]:
    """Context manager: serve the reading that `latest` returns, at `address` from a thread.

    Prints the URL to standard error. On a loopback address, requests for other host names are
    refused. Raises RequestError if the address can't be used.
    """
    registry = CollectorRegistry()
    registry.register(_ReadingCollector(latest))
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
    public = not is_loopback(address.authority)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if public or is_loopback(environ.get("HTTP_HOST", "")):
            return metrics(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Ask by a loopback address.\n"]

    kind = _Server6 if ":" in address.host else _Server4
    remedy = "Give a free port of this machine to --metrics."
    with as_request_error(f"Metrics can't be served at {address.authority}", remedy):
        server = make_server(*address, answer, kind, _Handler)
    threading.Thread(target=server.serve_forever, name="evener-metrics", daemon=True).start()
    url = f"http://{Address(address.host, server.server_port).authority}/metrics"
    readers = f" for everybody who reaches it: {WHAT_IS_SERVED}" if public else ""
    print(f"evener: metrics at {url}{readers}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


MIB = 2.0**-20  # bytes to MiB
DEVICE_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")  # dcgm-exporter's names
TRAINING_LABELS = ("training", "workload", "rank", "Hostname")
SHARE_LABELS = (*TRAINING_LABELS, "UUID", "device")

Labels = tuple[str, ...]

_DEVICES = (  # name, field of DeviceSample, factor, help
    (
        "DCGM_FI_DEV_GPU_UTIL",
        "utilization_percent",
        1,
        "Share of time in which any kernel ran (in %).",
    ),
    ("DCGM_FI_DEV_GPU_TEMP", "temperature_celsius", 1, "Temperature (in C)."),
    (
        "DCGM_FI_DEV_SLOWDOWN_TEMP",
        "temperature_limit_celsius",
        1,
        "Where the device slows itself down (in C).",
    ),
    ("DCGM_FI_DEV_POWER_USAGE", "power_watts", 1, "Power draw (in W)."),
    (
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
        "power_limit_watts",
        1,
        "Power limit that the driver enforces (in W).",
    ),
    ("DCGM_FI_DEV_SM_CLOCK", "clock_mhz", 1, "Clock of the multiprocessors (in MHz)."),
    (
        "DCGM_FI_DEV_MAX_SM_CLOCK",
        "clock_max_mhz",
        1,
        "Highest clock of the multiprocessors (in MHz).",
    ),
    ("DCGM_FI_DEV_FB_USED", "memory_used_bytes", MIB, "Memory in use (in MiB)."),
    ("DCGM_FI_DEV_FB_TOTAL", "memory_total_bytes", MIB, "Memory of the device (in MiB)."),
    ("DCGM_FI_DEV_FAN_SPEED", "fan_percent", 1, "Fan speed (in %)."),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "ecc_errors", 1, "Uncorrected memory errors since boot."),
    (
        "DCGM_FI_PROF_SM_ACTIVE",
        "sm_percent",
        0.01,
        "Ratio of time in which multiprocessors were busy.",
    ),
    (
        "DCGM_FI_PROF_SM_OCCUPANCY",
        "occupancy_percent",
        0.01,
        "Ratio of resident warps to the most possible.",
    ),
    (
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "tensor_percent",
        0.01,
        "Ratio of time in which tensor cores were busy.",
    ),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "dram_percent", 0.01, "Ratio of the memory bandwidth in use."),
    (
        "DCGM_FI_PROF_PCIE_RX_BYTES",
        "pcie_receive_bytes_per_second",
        1,
        "Received over PCIe (in bytes/s).",
    ),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "pcie_send_bytes_per_second", 1, "Sent over PCIe (in bytes/s)."),
    (
        "DCGM_FI_PROF_NVLINK_RX_BYTES",
        "link_receive_bytes_per_second",
        1,
        "Received over NVLink (in bytes/s).",
    ),
    (
        "DCGM_FI_PROF_NVLINK_TX_BYTES",
        "link_send_bytes_per_second",
        1,
        "Sent over NVLink (in bytes/s).",
    ),
    (
        "evener_throttled_ratio",
        "throttled_percent",
        0.01,
        "Ratio of time in which the device was throttled.",
    ),
    (
        "evener_device_samples_per_second",
        "samples_per_second",
        1,
        "Samples/s of all trainings on the device.",
    ),
)
# name, field of Training, help; 0 means unknown and is left out
_TRAININGS = (
    ("evener_tokens_per_second", "tokens_per_second", "Tokens/s of the rank, without padding."),
    ("evener_padding_ratio", "padding", "Ratio of the computed tokens that is padding."),
    ("evener_step_seconds", "step_s", "Median time of a step."),
    ("evener_step_spread_ratio", "step_spread", "Interquartile range of a step over its median."),
    ("evener_input_seconds", "input_s", "Median time of a step that goes into waiting for data."),
    (
        "evener_between_seconds",
        "between_s",
        "Median time of a step between its passes and the next batch.",
    ),
    (
        "evener_out_of_memory_passes",
        "retreats",
        "Passes that ran out of memory and were computed again.",
    ),
    (
        "evener_plan_samples_per_second",
        "plan_samples_per_second",
        "Samples/s of the whole training according to its plan.",
    ),
)

_NOISE = (  # name, field of NoiseScale, help; unknown ends are left out
    ("evener_noise_scale_rows", "rows", "Noise scale of the training's gradient."),
    ("evener_noise_scale_low_rows", "low", "The lower end of its 95 % interval."),
    ("evener_noise_scale_high_rows", "high", "The upper end of its 95 % interval."),
)


def metric_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of a reading: devices, ranks, gradient noise scale and shares."""
    hostname = clean(snapshot.host.hostname)
    yield _gauge(
        "evener_reading_timestamp_seconds",
        "When the devices were read.",
        (),
        [((), snapshot.at_seconds)],
    )
    yield from _device_families(snapshot, hostname)
    # Prometheus rejects a response with duplicate series: of two reports with one name, the newer
    # counts
    named = {
        _training_labels(report, hostname): report
        for report in sorted(snapshot.reports, key=lambda each: each.updated_at)
    }
    yield from _training_families(named)
    yield from _noise_families(named)
    yield from _share_families(
        named, {sample.device.id: sample.device for sample in snapshot.devices}
    )


def _energy_family(samples: Sequence[tuple[Labels, DeviceSample]]) -> Metric:
    family = UnknownMetricFamily(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy since evener began to read (in mJ).",
        labels=DEVICE_LABELS,
    )
    for labels, sample in samples:
        if sample.energy_joules.current is not None:
            family.add_metric(labels, 1e3 * sample.energy_joules.current)
    return family


def _device_families(snapshot: Snapshot, hostname: str) -> Iterator[Metric]:
    samples = [(_describe(sample.device, hostname), sample) for sample in snapshot.devices]
    for name, field, factor, help_text in _DEVICES:
        current = ((labels, getattr(sample, field).current) for labels, sample in samples)
        yield _gauge(
            name,
            help_text,
            DEVICE_LABELS,
            ((labels, factor * got) for labels, got in current if got is not None),
        )
    yield _energy_family(samples)
    lost = (
        (labels, float(sample.utilization_percent.state is State.LOST))
        for labels, sample in samples
    )
    yield _gauge(
        "evener_device_lost", "1 if the device or its driver has gone.", DEVICE_LABELS, lost
    )


def _training_families(named: Mapping[Labels, Training]) -> Iterator[Metric]:
    speeds = ((labels, each.samples_per_second) for labels, each in named.items())
    yield _gauge("evener_samples_per_second", "Samples/s of the rank.", TRAINING_LABELS, speeds)
    ages = ((labels, max(0.0, time.time() - each.updated_at)) for labels, each in named.items())
    yield _gauge(
        "evener_report_age_seconds", "Since the rank's last report.", TRAINING_LABELS, ages
    )
    late = ((labels, each.late_seconds(time.time())) for labels, each in named.items())
    yield _gauge(
        "evener_report_late_seconds",
        "How long the rank's next report is overdue.",
        TRAINING_LABELS,
        late,
    )
    steps = CounterMetricFamily(
        "evener_steps", "Steps that the rank has reported.", labels=TRAINING_LABELS
    )
    for labels, each in named.items():
        steps.add_metric(labels, each.step)
    yield steps
    for name, field, help_text in _TRAININGS:
        found = ((labels, getattr(each, field)) for labels, each in named.items())
        yield _gauge(
            name, help_text, TRAINING_LABELS, ((labels, got) for labels, got in found if got)
        )


def _noise_families(reports: Mapping[Labels, Training]) -> Iterator[Metric]:
    """Yield the gradient noise scale of each rank in rows, and the ends of its 95 % interval."""
    # A rank without a noise scale has no samples, and an infinite value is left out.
    for name, field, help_text in _NOISE:
        ends = (
            (labels, getattr(each.noise, field))
            for labels, each in reports.items()
            if each.noise is not None
        )
        yield _gauge(
            name,
            help_text,
            TRAINING_LABELS,
            ((labels, rows) for labels, rows in ends if rows < ENDLESS),
        )


def _share_families(
    trainings: Mapping[Labels, Training], devices: Mapping[str, Device]
) -> Iterator[Metric]:
    named = {
        (*labels, *_uuid_and_name(live, devices)): live
        for labels, training in trainings.items()
        for live in training.devices
    }
    shares = ((labels, live.batch) for labels, live in named.items() if live.batch)
    yield _gauge("evener_share_rows", "Rows of each global batch.", SHARE_LABELS, shares)
    passes = ((labels, live.micro) for labels, live in named.items() if live.micro)
    yield _gauge("evener_micro_rows", "Rows of one pass.", SHARE_LABELS, passes)
    timed = [(labels, live) for labels, live in named.items() if live.own_work_s]
    own_help = "Median time of a step until the rank's last gradient is ready."
    own = ((labels, live.own_work_s) for labels, live in timed)
    yield _gauge("evener_own_work_seconds", own_help, SHARE_LABELS, own)
    waits = ((labels, live.waiting_s) for labels, live in timed)
    yield _gauge(
        "evener_wait_seconds", "From there to the end of the backward pass.", SHARE_LABELS, waits
    )


def _gauge(
    name: str, help_text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _describe(device: Device, hostname: str) -> Labels:
    return (
        str(device.index),
        clean(device.id),
        _short_name(device),
        clean(device.name),
        clean(device.host) or hostname,
    )


def _short_name(device: Device) -> str:
    """Return a device name as dcgm-exporter writes it, such as "nvidia0"."""
    return f"{find_backend(device.kind).maker.lower() or device.kind}{device.index}"


def _training_labels(training: Training, hostname: str) -> Labels:
    """Return the labels of a rank: training run, workload, rank and host name."""
    # an unknown rank is ""
    rank = "" if training.rank < 0 else str(training.rank)
    host = next((clean(live.host) for live in training.devices if live.host), hostname)
    return clean(training.training or training.pid), clean(training.workload), rank, host


def _uuid_and_name(live: LiveDevice, devices: Mapping[str, Device]) -> tuple[str, str]:
    """Return the UUID and the short name of a rank's device."""
    # the monitor may not see this device
    device = devices.get(live.id)
    index = str(live.index) if live.index >= 0 else ""
    return clean(live.id), index if device is None else _short_name(device)
