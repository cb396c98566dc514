"""A process finds its share by host and device; missing or doubled shares are refused."""

from __future__ import annotations

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import PlanError, RequestError
from evener.plan.file import Share
from evener.training.launched import find_host
from evener.training.share_order import RankInfo, check_agreement, order_shares


def share(device: str, host: str = "") -> Share:
    return Share(device, 0, "a device", 4, 0.5, host=host)


def info(device: str = "", host: str = "", **more: object) -> RankInfo:
    return RankInfo(machine="here", host=host, device=device, **more)  # type: ignore[arg-type]


SLICES = [share("cpu-0-of-1", "one"), share("cpu-0-of-2", "two"), share("cpu-1-of-2", "two")]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Share], list[RankInfo], list[int]]:
    """Draw shares on one to three hosts with equal device names, and their ranks in any order."""
    hosts = [f"host{i}" for i in range(draw(st.integers(1, 3)))]
    shares = [share(f"GPU-{i}", host) for host in hosts for i in range(draw(st.integers(1, 4)))]
    shares = draw(st.permutations(shares))
    order = draw(st.permutations(range(len(shares))))
    return shares, [info(shares[i].device, shares[i].host) for i in order], list(order)


@given(worlds())
def test_a_rank_finds_its_share_by_host_and_device(
    world: tuple[list[Share], list[RankInfo], list[int]],
) -> None:
    """The share doesn't depend on the order of ranks."""
    shares, ranks, order = world
    assert order_shares(shares, ranks) == tuple(order)


@given(worlds(), st.data())
def test_a_share_taken_twice_is_refused(
    world: tuple[list[Share], list[RankInfo], list[int]], data: st.DataObject
) -> None:
    shares, ranks, _ = world
    if len(ranks) < 2:
        return
    first, second = data.draw(st.permutations(range(len(ranks))))[:2]
    ranks[first] = ranks[second]
    with pytest.raises(
        PlanError, match=rf"Ranks {min(first, second)} and {max(first, second)} all train on"
    ):
        order_shares(shares, ranks)


def test_slices_without_names_are_taken_by_local_rank() -> None:
    """As under torchrun, the plan's order within a host counts, whichever host comes first."""
    ranks = [info(host="two"), info(host="two", local_rank=1), info(host="one")]
    assert order_shares(SLICES, ranks) == (1, 2, 0)
    with pytest.raises(PlanError, match="Rank 2 trains on none"):
        order_shares(SLICES, [*ranks[:2], info(host="one", local_rank=1)])
    with pytest.raises(
        PlanError, match=r"Ranks 0 and 1 all train on two/CPU:0 .a device., and none on"
    ):
        order_shares(SLICES, [ranks[0], ranks[0], ranks[2]])
    with pytest.raises(
        PlanError, match="runs on here, which is none of the plan's hosts: one, two"
    ):
        order_shares(SLICES, [*ranks[:2], info()])


def test_gpus_that_a_process_sees_are_taken_by_local_rank() -> None:
    """The plan's order counts, not the framework's.

    A launcher may also show each process only its own GPU.
    """
    shares = [share("GPU-b"), share("GPU-a"), share("GPU-c")]
    seen = ("GPU-a", "GPU-b", "GPU-other", "GPU-c")
    assert order_shares(shares, [info(visible=seen, local_rank=i) for i in range(3)]) == (0, 1, 2)
    own = [info(visible=(f"GPU-{name}",), local_rank=i) for i, name in enumerate("cab")]
    assert order_shares(shares, own) == (2, 1, 0)
    with pytest.raises(
        PlanError, match=r"Rank 1 trains on none of the plan's devices: GPU:0 .a device., GPU:0"
    ):
        order_shares(shares, [own[0], info(visible=("GPU-x",)), own[2]])


def test_devices_of_another_machine_are_taken_in_the_order_of_ranks() -> None:
    ranks = [info(visible=("GPU-x", "GPU-y"), local_rank=i) for i in range(2)]
    assert order_shares([share("GPU-a"), share("GPU-b")], ranks) == (0, 1)


def test_ranks_with_another_plan_are_named() -> None:
    ranks = [info("GPU-a"), msgspec.structs.replace(info("GPU-b"), plan=7)]
    with pytest.raises(PlanError, match="Rank 1 trains with another plan"):
        check_agreement(ranks)


def test_ranks_that_would_train_otherwise_are_named() -> None:
    """If only one rank changed its shares, some rows would be doubled and others missing."""
    options = [{"weigh": "loss", "rebalance": rank == 2} for rank in range(3)]
    with pytest.raises(RequestError, match="Rank 2 has rebalance=True, rank 0 has rebalance=False"):
        check_agreement([info(options=each) for each in options])
    check_agreement([info(options=options[0])] * 2)


def test_this_machine_is_found_among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = socket.gethostname()
    assert find_host(["", ""]) == ""
    assert find_host([own, "203.0.113.1"]) == own
    assert find_host(["127.0.0.2", "203.0.113.1"]) == "127.0.0.2"  # by address
    assert find_host(["127.0.0.2", "127.0.0.3"]) == ""  # unclear
    assert find_host(["203.0.113.1", "nowhere.invalid"]) == ""
    monkeypatch.setenv("EVENER_HOST", "127.0.0.3")
    assert find_host(["127.0.0.2", "127.0.0.3"]) == "127.0.0.3"
