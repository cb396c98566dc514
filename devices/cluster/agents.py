"""Ray actors that run evener's functions and keep its objects on the hosts of a cluster.

An actor also reserves the GPUs of its host. An `Agent` is this process's handle to an actor.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar, cast

from evener.errors import DeviceError, EvenerError, RequestError

from .connection import Node, list_nodes

T = TypeVar("T")
ACTOR_LOST = "has lost evener's actor"
NODE_DIED = "node has died"  # part of Ray's message if an actor ended with its node
RESTART_SECONDS = 30.0  # timeout for restarting one actor
MOST_RESTARTS = 5  # per host; an actor that was killed this often would be killed again
START_SECONDS = 60.0  # timeout for all actors together: Python and Ray start slowly on a busy host
ALIVE_SECONDS = 12.0  # timeout for an answer from a started actor
ANSWER_SECONDS = 30.0  # timeout of a call
PARENT_POLL_SECONDS = 1.0
CLOSE_SECONDS = 5.0
RESERVE_SECONDS = 5.0
NODE_LABEL = "ray.io/node-id"  # set by Ray on each node
THREADS = 64  # per actor: each waiting call holds one
TICK_SECONDS = 0.2
_MISSING = re.compile(r"\b(?:ModuleNotFound|Import|Attribute)Error:")
_agents: dict[str, Agent] = {}  # the agents of this process, by host


class HostLostError(DeviceError):
    """A host has left the cluster, doesn't answer, or can't run evener."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"its host {host} {why}", "Check it with ray status.")
        self.host = host
        self.why = why


class ActorLostError(HostLostError):
    """An actor of evener has died, but its host is still in the cluster."""


class HostActor:
    """A Ray actor on one host of a cluster, which runs functions and keeps objects there."""

    def __init__(self) -> None:
        # Ray sets it to 1 for itself, and child processes would inherit that
        os.environ.pop("OMP_NUM_THREADS", None)
        self._kept: dict[str, Any] = {}
        threading.Thread(target=_end_with_parent, name="raylet", daemon=True).start()

    def gpu_ids(self) -> tuple[str, ...]:
        """Return the ids of the GPUs that Ray has assigned to this actor."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on this host, and return its result."""
        return function(*arguments)

    def keep(self, name: str, factory: Callable[..., Any], *arguments: Any) -> None:
        """Create an object by calling `factory`, and keep it in the actor under a name."""
        self._kept[name] = factory(*arguments)

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of the object that is kept under `name`, and return the result.

        `method` may have dots, such as "monitor.read", to call a method of an attribute.
        """
        return attrgetter(method)(self._kept[name])(*arguments)

    def drop(self, name: str) -> None:
        """Close and remove the object that is kept under `name`. Unknown names are ignored."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.close()


def _end_with_parent() -> None:
    """Exit this process once its parent process has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    # Ray doesn't end this process itself; its child processes exit with it
    os._exit(1)


class Agent:
    """This process's handle to evener's actor on one host. It can restart the actor if it dies.

    If `reserves` is True, the actor reserves the free GPUs of its node in Ray.
    """

    def __init__(self, node: Node, actor: Any, reserves: bool = True) -> None:
        self.node = node
        self.host = node.host
        self.reserves = reserves
        self.generation = 0  # how often its actor has been restarted
        self._actor = actor
        self._gpus = node.free_gpus if reserves else 0
        self._kept: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._restarting = threading.Lock()
        self._held_cpus = 0.0
        self._group: Any = None  # the placement group that holds the reserved CPUs

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start calling a method of the actor, and return Ray's reference to the result."""
        return getattr(self._actor, method).remote(*arguments)

    def finish(
        self, call: Any, seconds: float = ANSWER_SECONDS, stop: threading.Event | None = None
    ) -> Any:
        """Wait for a call that `begin` has started, and return its result.

        Returns None if the event `stop` is set in the meantime. Exceptions of the called function
        are raised again here. Raises `HostLostError` if there is no result after `seconds` seconds
        or the host is gone, and `ActorLostError` if only the actor has died.
        """
        import ray

        deadline = time.monotonic() + seconds
        try:
            while (
                stop is not None
                and not ray.wait([call], timeout=TICK_SECONDS)[0]
                and time.monotonic() < deadline
            ):
                if stop.is_set():
                    return None
            return ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise HostLostError(self.host, f"failed: {error}") from None
        except ray.exceptions.GetTimeoutError:
            raise HostLostError(self.host, f"has not answered for {seconds:.0f} s") from None
        except ray.exceptions.RayActorError as error:
            why = _explain_failure(error)
            raise (ActorLostError if why == ACTOR_LOST else HostLostError)(self.host, why) from None
        except ray.exceptions.RayError as error:
            raise HostLostError(self.host, _explain_failure(error)) from None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the host, and return its result."""
        return cast(T, self.finish(self.begin("call", function, *arguments)))

    def keep(self, factory: Callable[..., Any], *arguments: Any) -> RemoteObject:
        """Create an object on the host by calling `factory`, and return a handle to it.

        Closing the handle closes the object.
        """
        name = uuid.uuid4().hex
        self.finish(self.begin("keep", name, factory, *arguments))
        self._kept[name] = factory, arguments
        return RemoteObject(self, name)

    def drop(self, name: str) -> None:
        """Close the object that is kept under `name` on the host.

        Does nothing if the host is lost.
        """
        self._kept.pop(name, None)
        with suppress(HostLostError):
            self.finish(self.begin("drop", name), CLOSE_SECONDS)

    def restart(self, generation: int) -> bool:
        """Start a new actor after a failure, and recreate the objects that the old actor kept.

        `generation` is what `self.generation` was when the failed call began. If it has changed,
        another thread has already restarted the actor, and nothing is done. Returns False if the
        host has left the cluster, its GPUs are taken, or the actor has been restarted five times.
        """
        with self._restarting:
            if self.generation != generation:  # another thread has restarted it
                return True
            if generation == MOST_RESTARTS:
                return False
            try:
                if self.node.id not in {node.id for node in list_nodes()}:
                    return False
                self._actor = start_actor(self.node, self._gpus)
                self.finish(self.begin("gpu_ids"), RESTART_SECONDS)
                for name, (make, arguments) in tuple(self._kept.items()):
                    self.finish(self.begin("keep", name, make, *arguments))
            except EvenerError:  # the host has gone, or another job holds its devices now
                return False
            self.generation += 1
            return True

    def alive(self) -> bool:
        """Return True if the actor answers within 12 seconds."""
        try:
            self.finish(self.begin("gpu_ids"), ALIVE_SECONDS)
        except HostLostError:
            return False
        return True

    def hold_cpus(self, count: float) -> float:
        """Reserve logical CPUs of the node in Ray, and return how many couldn't be reserved.

        If `count` is larger than the node's number of CPUs in Ray, only that number is requested.
        """
        count = min(count, self.node.cpus)
        free = self.node.free_cpus + self._held_cpus
        if self._held_cpus != min(count, free):
            self._reserve(min(count, free))
        return count - self._held_cpus

    def _reserve(self, cpus: float) -> None:
        from ray.util import placement_group, remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._held_cpus = 0.0
        self._group = None
        if cpus > 0:
            self._group = placement_group(
                [{"CPU": cpus}], bundle_label_selector=[{NODE_LABEL: self.node.id}]
            )
            if self._group.wait(RESERVE_SECONDS):
                self._held_cpus = cpus

    def end(self) -> None:
        """Kill the actor, and release the GPUs and CPUs that it has reserved."""
        import ray

        self._reserve(0.0)
        ray.kill(self._actor)


class RemoteObject:
    """A handle to an object that a host's actor keeps."""

    def __init__(self, agent: Agent, name: str) -> None:
        self._agent = agent
        self._name = name

    @property
    def generation(self) -> int:
        """How many times the host's actor has been restarted."""
        return self._agent.generation

    def restart(self, generation: int) -> bool:
        """Start a new actor on the host after a failure, and recreate this object in it.

        `generation` is what `self.generation` was when the failed call began. If it has changed,
        another thread has already restarted the actor, and nothing is done. Returns False if the
        actor can't be restarted.
        """
        return self._agent.restart(generation)

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start calling a method of the object, and return Ray's reference to the result."""
        return self._agent.begin("ask", self._name, method, *arguments)

    def finish(self, call: Any, seconds: float) -> Any:
        """Wait for a call that `begin` has started, and return its result.

        Raises `HostLostError` if there is no result after `seconds` seconds.
        """
        return self._agent.finish(call, seconds)

    def ask(
        self,
        method: str,
        *arguments: Any,
        seconds: float = ANSWER_SECONDS,
        stop: threading.Event | None = None,
    ) -> Any:
        """Call a method of the object, and return its result.

        Returns None if the event `stop` is set in the meantime. Raises `HostLostError` if there is
        no result after `seconds` seconds.
        """
        return self._agent.finish(self.begin(method, *arguments), seconds, stop)

    def close(self) -> None:
        """Close the object on its host."""
        self._agent.drop(self._name)


def start_agents(nodes: Iterable[Node], reserve: bool = True) -> tuple[Agent, ...]:
    """Start evener's actor on each node, and return an agent for each node.

    An actor that this process started earlier is used again, unless it has died or lacks the
    reservations that are needed now. If `reserve` is True, each actor reserves the free GPUs of its
    node. Raises `DeviceError` if an actor doesn't start within a minute.
    """
    agents = []
    for node in nodes:
        there = _agents.get(node.host)
        if (
            there is None
            or there.node.id != node.id
            or (reserve and not there.reserves)
            or not there.alive()
        ):
            actor = start_actor(node, node.free_gpus if reserve else 0)
            _agents[node.host] = there = Agent(node, actor, reserve)
        there.node = node  # with its current resources
        agents.append(there)
    calls = [agent.begin("gpu_ids") for agent in agents]
    deadline = time.monotonic() + START_SECONDS
    for agent, call in zip(agents, calls, strict=True):
        try:
            agent.finish(call, max(1.0, deadline - time.monotonic()))
        except HostLostError as lost:
            del _agents[agent.host]
            raise DeviceError(f"The host {agent.host} {lost.why}.", REMEDY) from None
    return tuple(agents)


def ask_each(
    agents: Sequence[Agent],
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    with_gpus: bool,
) -> dict[Agent, Any]:
    """Call a function on all hosts at the same time, and return the result of each agent.

    The function gets two arguments: the host's entry in `arguments`, and the ids of the GPUs that
    Ray has assigned to the host's actor, or None if `with_gpus` is False. If it raises a
    RequestError, the error is raised here with the host's name.
    """
    ids = [agent.finish(agent.begin("gpu_ids")) if with_gpus else None for agent in agents]
    calls = [
        agent.begin("call", function, arguments[agent.host], own)
        for agent, own in zip(agents, ids, strict=True)
    ]
    return {agent: _finish(agent, call) for agent, call in zip(agents, calls, strict=True)}


def _finish(agent: Agent, call: Any) -> Any:
    """Wait for a call, and return its result. The host's name is added to a `RequestError`."""
    try:
        return agent.finish(call)
    except RequestError as fault:
        raise RequestError(f"{agent.host}: {fault.message}", fault.remedy) from None


REMEDY = (
    "Install the same evener there, in the Python that its ray start ran in, or leave the host out."
)


def find_agent(host: str) -> Agent:
    """Return the agent of a host.

    Raises `HostLostError` if this process hasn't started one.
    """
    agent = _agents.get(host)
    if agent is None:
        raise HostLostError(host, "has no actor of evener")
    return agent


def start_actor(node: Node, gpus: int) -> Any:
    """Start an actor on a node, with this number of GPUs reserved, but don't wait for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(HostActor)
        .options(
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
        )
        .remote()
    )


def _explain_failure(error: Exception) -> str:
    """Return a phrase such as "has left the cluster" that says how an actor failed.

    It completes a sentence that begins with the host's name.
    """
    missing = [line.strip() for line in str(error).splitlines() if _MISSING.search(line)]
    if missing:
        return f"can't run evener: {missing[-1].rstrip('.')}"

    import ray

    died = isinstance(error, ray.exceptions.ActorDiedError)
    return ACTOR_LOST if died and NODE_DIED not in str(error) else "has left the cluster"
