"""The hosts of a plan's shares in a Ray cluster, and actors that hold the GPUs there that the plan doesn't use."""

from __future__ import annotations

from collections.abc import Collection

from evener.errors import DeviceError, PlanError
from evener.plan.file import Plan

from .agents import Agent, start_actor
from .connection import Node, connect, list_nodes
from .discovery import find_node, name_gpus


def find_plan_nodes(plan: Plan, address: str) -> dict[str, Node]:
    """The node of each host that computes, by the plan's name for it, the plan's first one first.

    PlanError if the plan names no hosts; RequestError or DeviceError if one of them isn't in the cluster at `address`.
    """
    hosts = list(dict.fromkeys(share.host for share in plan.layout.active))
    if not hosts[0]:
        raise PlanError("The plan is for one machine, and names no hosts.", "Start it with evener launch, without Ray.")
    connect(address)
    nodes = list_nodes()
    return {host: find_node(host, nodes) for host in hosts}


def hold_other_gpus(node: Node, wanted: Collection[str]) -> list[Agent]:
    """Actors that hold the node's free GPUs but for the wanted ones, which are then all that Ray can give away there.

    DeviceError if one that is wanted isn't free. What is held is given back when the actors are forgotten.
    """
    if node.gpus == node.free_gpus == len(wanted):
        return []
    agents = [Agent(node, start_actor(node, 1)) for _ in range(node.free_gpus)]
    held = {",".join(agent.call(name_gpus, agent.finish(agent.begin("gpu_ids")))): agent for agent in agents}
    missing = [name for name in wanted if name not in held]
    if missing:
        raise DeviceError(
            f"The host {node.host} has no free GPU {', '.join(missing)}: another job of the cluster holds it.",
            "Wait for those jobs, or make a plan for what is there.",
        )
    for name in wanted:
        held.pop(name).end()
    return list(held.values())
