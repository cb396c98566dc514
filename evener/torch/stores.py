"""Let ranks meet through files, and let TCP stores listen on one address only."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial, wraps
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from ..training.first_rank import is_eveners_rank, release_others
from ..training.launched import GROUPS, rendezvous_file
from .private import rendezvous_handlers

EVERY_ADDRESS = ("0.0.0.0", "::")
_STORE_ARGUMENTS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers"),
    *("multi_tenant", "master_listen_fd", "use_libuv"),
)

_numbers = count()  # numbers of the process groups that this process creates
_parent = os.environ.get(GROUPS, "")

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def open_file_store(path: str) -> Any:
    """Open a key-value store in a file, which any number of processes can share."""
    # with a fixed number of processes, they would delete the file when they exit
    return dist.FileStore(path, -1)


def replace_rendezvous() -> None:
    """Let process groups meet through a file, if `evener launch` has chosen their address.

    This replaces PyTorch's handlers for env:// and tcp:// addresses, which still handle all other
    addresses. Other TCP stores in this process then listen only on their own address.
    """
    # PyTorch's public `register_rendezvous_handler` can only add schemes
    _limit_tcp_stores()
    handlers = rendezvous_handlers()
    for scheme in ("env", "tcp"):
        if not isinstance(handlers[scheme], partial):
            handlers[scheme] = partial(_rendezvous, handlers[scheme])


def _rendezvous(original: Handler, url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Rendezvous handler that yields a store, this process's rank and the number of ranks."""
    place = dict(parse_qsl(urlsplit(url).query))
    rank = place.get("rank", os.environ.get("RANK"))
    world = place.get("world_size", os.environ.get("WORLD_SIZE"))
    path = rendezvous_file(_read_address(url))
    # for an address that evener launch didn't choose, PyTorch's own handler yields them
    if path is None or rank is None or world is None:
        yield from original(url, **options)
        return
    _release_other_ranks()
    store = dist.PrefixStore(_choose_prefix(), open_file_store(path))
    if "timeout" in options:
        store.set_timeout(options["timeout"])
    yield store, int(rank), int(world)
    raise RuntimeError("A second rendezvous isn't possible by the same handler.")


def _release_other_ranks() -> None:
    """Let the launcher start the other ranks, because rank 0 is creating its process group."""
    # An elastic agent (torchrun) that the user's script started itself, perhaps with the same
    # address, doesn't release them.
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.elastic"):
            return
        frame = frame.f_back
    if is_eveners_rank():
        release_others()


def _read_address(url: str) -> str:
    """Return the address at which the ranks meet, as "host:port", from a rendezvous URL."""
    # for env://, it is in environment variables
    if urlsplit(url).scheme == "env":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return urlsplit(url).netloc


def _choose_prefix() -> str:
    """Return a new prefix for the keys of the next process group in the store."""
    # Each process group needs a new prefix, because the file still has the addresses of the
    # previous group. Groups are numbered in order of creation, which is the same in all of their
    # processes. A child process adds its parent's number, as in evener/group/1/0. Stores without a
    # process group share evener/shared.
    make_group = inspect.unwrap(dist.init_process_group).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not make_group:
        frame = frame.f_back
    if frame is None:
        return "evener/shared"
    number = next(_numbers)
    os.environ[GROUPS] = f"{_parent}{number + 1}/"
    return f"evener/group/{_parent}{number}"


def _limit_tcp_stores() -> None:
    """Make TCP stores listen only at the address of their own host, not on all interfaces."""
    original = dist.TCPStore.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def begin(store: Any, *given: Any, **named: Any) -> None:
        arguments = dict(zip(_STORE_ARGUMENTS, given, strict=False)) | named
        if rendezvous_file(f"{arguments['host_name']}:{arguments['port']}") is not None:
            _release_other_ranks()
        if arguments.get("is_master") and arguments.get("master_listen_fd") is None:
            arguments |= listen_at(arguments["host_name"], arguments["port"])
        original(store, **arguments)

    dist.TCPStore.__init__ = begin


def listen_at(host: str, port: int) -> dict[str, int]:
    """Return arguments that make a TCPStore listen at `host` only, not on all interfaces.

    The result is empty for 0.0.0.0 and ::, and if the host can't be resolved or bound.
    """
    if host in EVERY_ADDRESS:
        return {}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
            return {"port": door.getsockname()[1], "master_listen_fd": door.detach()}
    except OSError:
        return {}


def open_tcp_store(host: str, port: int, serves: bool, timeout: timedelta) -> Any:
    """Connect to the TCPStore at a host and port, and return it.

    With `serves`, this process runs the server. Otherwise, another process has to run it; if none
    does within `timeout`, RuntimeError is raised.
    """
    place = {"port": port, **(listen_at(host, port) if serves else {})}
    return dist.TCPStore(host, is_master=serves, timeout=timeout, multi_tenant=True, **place)
