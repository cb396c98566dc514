"""Why hosts of a cluster are left out: what the fastest layout over more of them made, and what the network took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.balancer.result.explain import COVERS
from evener.balancer.result.gains import printed_gain
from evener.balancer.result.number_format import join_words, percent, rate
from evener.balancer.types import Layout, Result
from evener.devices.types import Device


def explain_hosts(
    chosen: Result, results: Sequence[Result], devices: Sequence[Device], network_seconds: Callable[[int], float]
) -> str:
    """A sentence on the hosts that a chosen split leaves out; "" if nothing over more hosts was measured as slower.

    `network_seconds` is what exchange between so many hosts takes of a step.
    """

    def list_hosts(layout: Layout) -> list[str]:
        return list(dict.fromkeys(devices[i].host for i in layout.active))

    own = list_hosts(chosen.layout)
    wider = [one for one in results if len(list_hosts(one.layout)) > len(own)]
    fastest = max(wider, key=lambda one: one.throughput.value, default=None)
    if not chosen.layout.traits.together or fastest is None or fastest.throughput.value >= chosen.throughput.value:
        return ""
    there = list_hosts(fastest.layout)
    seconds = network_seconds(len(there))
    loss = -printed_gain(fastest.throughput.value, chosen.throughput.value)
    batch = fastest.layout.global_batch
    size = f", at {batch} samples," if batch != chosen.layout.global_batch else ""
    covers = seconds >= COVERS * loss * batch / fastest.throughput.value
    left_out = [host for host in there if host not in own]
    verb = "is" if len(left_out) == 1 else "are"
    cause = f", as the network takes {seconds * 1000:.3g} ms of each step" if covers else ""
    return (
        f" {join_words(left_out)} {verb} left out: the fastest split over {len(there)} hosts{size} makes"
        f" {rate(fastest.throughput.value)} samples/s, {percent(loss, 0 if loss >= 0.02 else 1)} less{cause}."
    )
