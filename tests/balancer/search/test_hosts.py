"""Layouts over several hosts.

The cost of exchange over the network is learned separately, and decides how many hosts take part.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.balancer.events import Finished
from evener.balancer.probes.simulated import SimulatedProber
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.search.machine_model import fit_exchange_costs
from evener.balancer.search.predictions import split_over_hosts
from evener.balancer.search.search import Search
from evener.balancer.session import Session
from evener.balancer.types import Layout, Problem
from evener.devices.machine import Machine, SimulatedDevice, Sync
from evener.shares.curves import Curve
from evener.shares.waterfill import Allocation, Costs, DeviceCurve, split_fixed, split_free
from tests.support.machines import samples_per_second


def make_machine(hosts: int, each: int, sync: Sync, seed: int = 1, noise: float = 0.003) -> Machine:
    """Return hosts of unequal GPUs, some hosts far faster than others."""
    rng = random.Random(seed)
    devices = []
    for host in range(hosts):
        speed = rng.uniform(1.0, 4.0)
        for i in range(each):
            slope = rng.uniform(0.08, 0.12) * speed
            fixed, most = slope * rng.uniform(10, 60), rng.randint(300, 1500)
            devices.append(
                SimulatedDevice(
                    name=f"gpu {host} {i}",
                    host=f"10.0.0.{host}",
                    memory_mib=100.4 + most,
                    memory_base_mib=100,
                    memory_per_sample_mib=1,
                    curve=((1, fixed + slope), (4000, fixed + slope * 4000)),
                    noise=noise,
                )
            )
    return Machine(tuple(devices), sync)


def search_on(machine: Machine, **options: Any) -> tuple[Search, Layout]:
    """Return a whole search, and its best layout."""
    names = list(dict.fromkeys(device.host for device in machine.devices))
    count = len(machine.devices)
    problem = Problem(
        count,
        tuple(machine.usable_memory_bytes(i) for i in range(count)),
        hosts=tuple(names.index(device.host) for device in machine.devices),
        **options,
    )
    search, prober = Search(problem), SimulatedProber(machine, 0)
    while probes := search.ask():
        for seen in prober.measure(probes, lambda _: None, threading.Event()):
            search.tell(seen)
    best = search.best()
    assert best is not None
    return search, best.layout


def best_rate(machine: Machine, batch: int | None = None) -> float:
    """Return the highest possible samples/s.

    For each finish time and number of hosts, it uses the hosts that compute most by then. It is
    exact if exchange doesn't depend on the number of devices.
    """
    hosts: dict[str, list[tuple[float, float, int]]] = {
        device.host: [] for device in machine.devices
    }
    for i, device in enumerate(machine.devices):
        (b0, t0), (b1, t1) = device.curve
        largest = int((machine.usable_memory_bytes(i) / 2**20 - 100) // 1)
        hosts[device.host].append((t0 - (t1 - t0) / (b1 - b0) * b0, (t1 - t0) / (b1 - b0), largest))
    ends = [fixed + slope * most for each in hosts.values() for fixed, slope, most in each]
    times = np.linspace(0.0, max(ends), 20_000)[1:]
    done = np.stack(
        [
            sum(
                np.clip(np.floor((times - fixed) / slope + 1e-9), 0, most)
                for fixed, slope, most in each
            )
            for each in hosts.values()
        ]
    )
    totals = np.cumsum(-np.sort(-done, axis=0), axis=0)
    costs = 1000 * np.array([machine.sync.seconds(2, h) for h in range(1, len(hosts) + 1)])[:, None]
    if batch is None:
        return float(1000 * np.max(totals / (times + costs)))
    return float(1000 * batch / np.min(np.where(totals >= batch, times + costs, np.inf)))


@pytest.mark.parametrize("batch", [None, 2048])
@pytest.mark.parametrize("network_ms", [0.0, 20.0, 400.0])
def test_the_network_decides_how_many_hosts_take_part(network_ms: float, batch: int | None) -> None:
    machine = make_machine(3, 2, Sync(base_ms=1.0, network_ms=network_ms))
    search, layout = search_on(machine, global_batch=batch, tolerance=0.0, micro=False)
    assert samples_per_second(machine, layout.shares) >= 0.97 * best_rate(machine, batch)
    hosts = {machine.devices[i].host for i in layout.active}
    assert len(hosts) == (3 if network_ms == 0 else 1 if network_ms == 400 else len(hosts))
    if network_ms == 400:
        raced = [one.candidate.layout for one in search.evaluation.ranking()]
        assert any(len({machine.devices[i].host for i in one.active}) == 3 for one in raced), (
            "it is compared"
        )


@pytest.mark.parametrize("part", [None, 0.03, 0.15, 0.3])
@pytest.mark.parametrize("seed", [7, 14, 16, 19])
def test_of_several_hosts_the_best_set_is_found(seed: int, part: float | None) -> None:
    """It is as good as the best of all sets, for a free batch and for fractions of the largest
    batch.
    """
    rng = random.Random(seed)
    lines = [
        (rng.uniform(0.001, 0.05), rng.uniform(1e-4, 1e-3), rng.randint(50, 1000)) for _ in range(8)
    ]
    devices = [
        DeviceCurve(i, Curve((0.0, 1.0), (fixed, fixed + each), each), most)
        for i, (fixed, each, most) in enumerate(lines)
    ]
    hosts = [i // 2 for i in range(8)]
    network = rng.choice((0.01, 0.03, 0.1))
    costs = [(0.0, 0.0, *(0.002 + more * network,) * 7) for more in (0.0, 0.0, 1.0, 1.5, 2.0)]
    batch = None if part is None else int(part * sum(device.limit for device in devices))

    def solve(some: Sequence[DeviceCurve], exchange: Costs) -> Allocation | None:
        return split_free(some, exchange) if batch is None else split_fixed(some, exchange, batch)

    found = split_over_hosts(devices, hosts, costs, solve)
    sets = (chosen for size in range(1, 5) for chosen in combinations(range(4), size))
    every = (
        solve(
            [device for device in devices if hosts[device.position] in chosen], costs[len(chosen)]
        )
        for chosen in sets
    )
    assert found is not None
    assert found.samples_per_second >= 0.995 * max(one.samples_per_second for one in every if one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "batch", "network"),
    [(6, None, Sync(2.0)), (16, 25_600, Sync(2.0, 0.0, 10, 1)), (6, 1536, Sync(2.0, 0.0, 400))],
)
def test_many_hosts_of_8_unequal_gpus(hosts: int, network: Sync, batch: int | None) -> None:
    machine = make_machine(hosts, 8, network, noise=0.0)
    _, layout = search_on(machine, global_batch=batch, tolerance=0.0, micro=False)
    assert samples_per_second(machine, layout.shares) >= 0.995 * best_rate(machine, batch)


def test_exchange_within_a_host_and_across_hosts_is_learnt_apart() -> None:
    nothing = fit_exchange_costs([], 4, 2)
    assert nothing[2][4] == 0.0
    across = fit_exchange_costs([(4, 2, 0.1, 0.001)], 4, 2)
    assert (across[1][4], across[2][4]) == (0.0, pytest.approx(0.1))
    both = fit_exchange_costs([(4, 2, 0.1, 0.001), (2, 1, 0.01, 0.001)], 4, 2)
    assert both[1][2] == pytest.approx(0.01)
    assert both[2][4] == pytest.approx(0.1)
    assert both[2][:3] == (0.0, 0.0, pytest.approx(0.1))
    assert both[1][:3] == (0.0, 0.0, pytest.approx(0.01))


MACHINE = """
[sync]
network_ms = {network_ms}
"""
DEVICE = """
[[device]]
name = "A {number}"
host = "{host}"
memory_mib = 1000
memory_base_mib = 100
memory_per_sample_mib = 1
curve = [[1, 10], [800, 90]]
"""


@pytest.mark.parametrize("network_ms", [0, 300])
def test_the_verdict_says_what_the_network_takes(network_ms: int, tmp_path: Path) -> None:
    """A machine file with hosts runs through a whole session."""
    path = tmp_path / "hosts.toml"
    devices = "".join(DEVICE.format(number=i, host="left" if i < 2 else "right") for i in range(4))
    path.write_text(devices + MACHINE.format(network_ms=network_ms))
    session = Session(
        open_run(
            Request(f"sim:{path}", workload="synthetic", global_batch=1600, budget_seconds=None)
        )
    )
    *_, ended = session.events()
    session.close()
    assert isinstance(ended, Finished)
    hosts = [share.host for share in ended.plan.layout.active]
    if network_ms:
        assert len(set(hosts)) == 1
        assert "left out: the fastest split over 2 hosts reaches" in ended.verdict
        assert "because the network takes 300 ms of each step" in ended.verdict
    else:
        assert hosts == ["left", "left", "right", "right"]
        assert "left out" not in ended.verdict
