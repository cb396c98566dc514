"""Rendezvous stores of PyTorch's processes, and the messages in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist

from evener.system.memory_files import make_memory_file
from evener.torch import stores as torch_stores
from evener.torch.messages import broadcast_message, gather_messages
from evener.training.launched import RENDEZVOUS
from tests.support.listeners import Listener, list_listeners

TIME = timedelta(seconds=20)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use evener's rendezvous handler in PyTorch during the test."""
    handlers = dist.rendezvous.__globals__["_rendezvous_handlers"]
    before = dict(handlers)
    monkeypatch.setattr(dist.TCPStore, "__init__", dist.TCPStore.__init__)
    torch_stores.replace_rendezvous()
    yield
    handlers.update(before)


def find_new(before: set[Listener]) -> set[str]:
    """Return the addresses of sockets on which this process has started to listen."""
    return {each.address for each in list_listeners(os.getpid()) - before}


def test_a_store_over_hosts_listens_on_its_address_alone() -> None:
    before = list_listeners(os.getpid())
    store = torch_stores.open_tcp_store("127.0.0.3", 0, True, TIME)
    assert find_new(before) == {"127.0.0.3"}
    other = torch_stores.open_tcp_store("127.0.0.3", store.port, False, TIME)
    other.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["127.0.0.4", "localhost"])
def test_a_store_of_a_program_listens_on_its_address_alone(host: str, replaced: None) -> None:
    """The address is passed in either way; a second store of the process shares the port."""
    before = list_listeners(os.getpid())
    store = dist.TCPStore(host, 0, is_master=True, timeout=TIME, multi_tenant=True)
    assert find_new(before) == {"127.0.0.4" if host == "127.0.0.4" else "127.0.0.1"}
    second = dist.TCPStore(host, store.port, None, True, TIME, multi_tenant=True)
    second.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("way", ["env://", "tcp://127.0.0.1:4711", "tcp://localhost:4711"])
def test_the_launchs_address_is_answered_by_its_file(
    way: str, replaced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there; PyTorch itself handles any other address."""
    monkeypatch.setenv(RENDEZVOUS, f"127.0.0.1:4711 {make_memory_file()}")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    before = list_listeners(os.getpid())
    stores = [next(dist.rendezvous(way, rank, 2)) for rank in (0, 1)]
    stores[0][0].set("a", "b")
    assert [each[1:] for each in stores] == [(0, 2), (1, 2)]
    assert stores[1][0].get("a") == b"b"
    assert list_listeners(os.getpid()) == before
    other, _, _ = next(dist.rendezvous("tcp://127.0.0.1:0", 0, 1))
    assert len(list_listeners(os.getpid()) - before) == 1
    assert isinstance(other, dist.TCPStore)


class ExampleMessage(msgspec.Struct):
    """A test message."""

    text: str
    number: float = 0.0


def test_messages_between_ranks_are_json_of_a_type() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        message = ExampleMessage("näme\n" * 1000, float("inf"))
        assert gather_messages(message, ExampleMessage) == [message]
        assert broadcast_message({"best": float("-inf"), "": [None]}) == {
            "best": float("-inf"),
            "": [None],
        }
        with pytest.raises(msgspec.ValidationError):
            gather_messages({"number": "one"}, ExampleMessage)
    finally:
        dist.destroy_process_group()
