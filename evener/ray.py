"""Train with a plan in Ray Train."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from evener.devices.cluster.agents import NODE_LABEL
from evener.devices.cluster.connection import Node
from evener.devices.cluster.discovery import find_plan_nodes, hold_other_gpus
from evener.devices.network import choose_interface

from .errors import PlanError, RequestError
from .plan.check import check_fit
from .plan.file import Plan, load_plan, to_toml
from .torch.ranks.ranks import is_cpu, visible_gpus
from .training.launched import DEVICE, HOST, PLAN

try:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, get_device
except ImportError as error:
    raise RequestError(
        f"Ray Train can't be imported ({error}).", 'Install it: pip install "evener[ray-train]".'
    ) from error

_DECIDED = ("scaling_config", "datasets", "dataset_config")


def trainer(
    plan: Plan | str | os.PathLike[str],
    train_loop: Callable[..., Any],
    *,
    torch_config: TorchConfig | None = None,
    ray_address: str = "",
    **options: Any,
) -> TorchTrainer:
    """Return a Ray TorchTrainer with one worker on each device of the plan.

    - `train_loop`: the training function, in which `evener.torch.Split()` finds the plan.
    - `ray_address`: address of the Ray cluster.
    - `options`: further arguments of TorchTrainer.

    Raises PlanError if the plan doesn't fit, and RequestError for an option that the plan decides,
    such as `scaling_config`.
    """
    chosen = plan if isinstance(plan, Plan) else load_plan(plan)
    _check(chosen, options)
    nodes = find_plan_nodes(chosen, ray_address)
    active = chosen.layout.active
    uses_gpus = not all(map(is_cpu, active))
    held = _reserve_other_gpus(chosen, nodes)
    base = torch_config or TorchConfig()
    given = {each.name: getattr(base, each.name) for each in fields(TorchConfig)}
    if uses_gpus and not base.backend:
        given["backend"] = "cpu:gloo,cuda:nccl"  # the same as Split's
    made = TorchTrainer(
        _with_plan(chosen, train_loop),
        torch_config=PlanConfig(**given, hosts={node.id: host for host, node in nodes.items()}),
        scaling_config=ScalingConfig(
            num_workers=len(active),
            use_gpu=uses_gpus,
            resources_per_worker=_choose_resources(chosen, nodes),
            label_selector=[{NODE_LABEL: nodes[share.host].id} for share in active],
        ),
        **options,
    )
    made.held = held
    return made


def _reserve_other_gpus(plan: Plan, nodes: dict[str, Node]) -> list[Any]:
    """Reserve the GPUs that the plan doesn't use, so that Ray assigns none of them to a worker.

    The GPUs stay reserved until the returned agents are ended.
    """
    held = []
    for host, node in nodes.items():
        own = [share for share in plan.layout.active if share.host == host]
        gpus = [share.device for share in own if not is_cpu(share)]
        if gpus:
            held += hold_other_gpus(node, gpus)
    return held


def _check(plan: Plan, options: dict[str, Any]) -> None:
    check_fit(plan, devices=None, world=None, workload_digest=None, strict=False)
    if plan.framework != "torch":
        raise PlanError(
            f"The plan is for {plan.framework}, and evener.ray trains with PyTorch.",
            "Start it with evener launch --ray.",
        )
    for name in _DECIDED:
        if name in options:
            raise RequestError(
                f"{name} is decided by the plan; Ray's own would share rows out equally.",
                "Leave it out, and take rows from split.loader.",
            )


def _choose_resources(plan: Plan, nodes: dict[str, Node]) -> dict[str, float]:
    """Return the Ray resources of each worker, which have to be the same for all workers."""
    # A worker gets one CPU, or a fraction if a host has fewer CPUs than workers. If the plan uses
    # GPUs, it also gets one GPU.
    shares = [share.host for share in plan.layout.active]
    resources = {"CPU": min(1.0, *(node.cpus / shares.count(host) for host, node in nodes.items()))}
    return resources if all(map(is_cpu, plan.layout.active)) else {**resources, "GPU": 1}


def _with_plan(plan: Plan, train_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the training function so that `Split()` finds the plan and the worker's device."""
    # both are passed by the environment variables that `evener launch` uses
    text = to_toml(plan)

    @functools.wraps(train_loop)
    def train(*arguments: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="evener-") as folder:
            path = Path(folder, "plan.toml")
            path.write_bytes(text)
            os.environ[PLAN] = str(path)
            own = get_device()
            os.environ[DEVICE] = next(
                (name for name, i in visible_gpus().items() if own.index == i), ""
            )
            return train_loop(*arguments)

    return train


@dataclass
class PlanConfig(TorchConfig):  # type: ignore[misc]  # Ray isn't followed
    """TorchConfig that also selects the network interface of each host."""

    hosts: dict[str, str] = field(default_factory=dict)  # by node id

    @property
    def backend_cls(self) -> type:
        """Backend class that sets up the workers."""
        return _PlanBackend


class _PlanBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: PlanConfig) -> None:
        """Select the network interfaces, then start PyTorch's process group."""
        worker_group.execute(_set_network_interface, backend_config.hosts)
        super().on_start(worker_group, backend_config)


def _set_network_interface(hosts: dict[str, str]) -> None:
    host = hosts[ray.get_runtime_context().get_node_id()]
    os.environ.update({HOST: host, **choose_interface(host, hosts.values())})
