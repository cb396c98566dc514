"""This process's connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
from importlib.util import find_spec

import msgspec
import psutil

from evener.errors import DeviceError, RequestError

ADDRESS_VARIABLE = "RAY_ADDRESS"
LISTEN_SECONDS = 3.0
CONNECT_SECONDS = 10.0
_RAYLET = "raylet"  # Ray's process on each node
# the preface of HTTP/2, with empty settings
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP2_SETTINGS = 4  # type of the first frame of every HTTP/2 server, such as a gRPC server


class Node(msgspec.Struct, frozen=True):
    """A node of the Ray cluster, with its resources."""

    id: str
    host: str  # its address within the cluster, which plans use
    name: str  # its host name; in tests several nodes may share one
    gpus: int  # GPUs that Ray has for its jobs
    free_gpus: int
    cpus: float = 0.0  # logical CPUs that Ray has for its jobs
    free_cpus: float = 0.0


def connect(address: str = "") -> None:
    """Join the Ray cluster at `address`, unless this process has already joined one.

    Without an address, the one in RAY_ADDRESS is used, or else the cluster that runs on this
    machine. Raises `RequestError` if Ray isn't installed or the address is malformed, and
    `DeviceError` if this machine isn't a node of a cluster or can't join it.
    """
    if find_spec("ray") is None:
        raise RequestError("Ray is not installed.", "Install it: pip install 'evener[ray]'.")
    import ray

    if ray.is_initialized():
        return
    wanted = address or os.environ.get(ADDRESS_VARIABLE) or "auto"
    if wanted != "auto":
        _check_listener(wanted)
    if not any(process.info["name"] == _RAYLET for process in psutil.process_iter(["name"])):
        where = "HOST:6379" if wanted == "auto" else wanted
        raise DeviceError(
            "This machine is not a node of a Ray cluster.",
            f"Make it one: ray start --address={where}; or begin a cluster here: ray start --head.",
        )
    _join(wanted)


def list_nodes() -> tuple[Node, ...]:
    """Return the nodes of the cluster that are alive, sorted by address.

    Each address appears only once. A node that has just ended may still be among them.
    """
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    found = [
        Node(
            id=node["NodeID"],
            host=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            gpus=int(node["Resources"].get("GPU", 0)),
            free_gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            cpus=node["Resources"].get("CPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    by_host = {node.host: node for node in found}
    return tuple(by_host[host] for host in sorted(by_host))


def check_head() -> None:
    """Raise `DeviceError` if the head node of the cluster can't be reached."""
    import ray

    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), LISTEN_SECONDS).close()
    except OSError as error:
        message = (
            f"The head of the Ray cluster, {host}:{port}, doesn't answer any more: "
            f"{error.strerror or error}."
        )
        raise DeviceError(message, "Start the cluster again, and then this.") from None


def _join(address: str) -> None:
    """Join the cluster in a background thread, and wait until it has joined.

    Raises `DeviceError` if that fails or takes more than 10 seconds.
    """
    import ray
    from ray._private import worker

    # Ray would print events of other nodes on standard output
    worker.print_to_stdstream = lambda *_, **__: None
    faults: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:
            faults.append(error)

    # in the main thread, Ray would wait for a minute and replace the signal handlers
    thread = threading.Thread(target=join, name="ray", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if thread.is_alive():
        raise DeviceError(
            f"The Ray cluster at {address} didn't answer within {CONNECT_SECONDS:.0f} s.",
            "Check it with ray status, and that this machine is a node of it.",
        )
    if faults:
        raise _explain(address, faults[0])


def _explain(address: str, error: Exception) -> DeviceError:
    text = " ".join(str(error).split())
    if text.startswith("Version mismatch: "):
        words = text.removeprefix("Version mismatch: ")
        return DeviceError(
            f"The Ray cluster at {address} has other versions: {words}.",
            "Install the same everywhere.",
        )
    if isinstance(error, ConnectionError) and address == "auto":
        return DeviceError(
            "No Ray cluster runs on this machine.",
            "Begin one with ray start --head, or give --ray-address HOST:6379.",
        )
    return DeviceError(
        f"The Ray cluster at {address} can't be joined: {text}", "Check it with ray status."
    )


def _check_listener(address: str) -> None:
    """Check that a Ray cluster listens at an address.

    Ray itself would keep retrying for a long time. Raises `RequestError` if the address is
    malformed, and `DeviceError` if nothing listens there or the answer isn't HTTP/2, which gRPC
    uses.
    """
    host, colon, port = address.rpartition(":")
    if (
        "://" in address
        or not colon
        or not host
        or not port.isdigit()
        or not 0 < int(port) < 1 << 16
    ):
        raise RequestError(
            f"{address!r} is not the address of a Ray cluster.",
            "Write HOST:PORT, as ray start --head prints it.",
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS) as link:
            link.settimeout(LISTEN_SECONDS)
            link.sendall(_HTTP2_GREETING)
            answer = link.recv(9)
    except TimeoutError:
        answer = b""
    except OSError as error:
        raise DeviceError(
            f"Nothing listens at {address}: {error.strerror or error}.",
            "Start the cluster there with ray start --head, or correct --ray-address.",
        ) from None
    if len(answer) < 4 or answer[3] != _HTTP2_SETTINGS:
        raise DeviceError(
            f"What listens at {address} is not a Ray cluster.",
            "Give the port that ray start --head prints.",
        )
