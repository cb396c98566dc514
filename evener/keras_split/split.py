"""`Split`: takes a plan, or the seed's `gpus` and `ratios`, and makes a Keras model train on several devices by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import PathLike
from typing import Any

import tensorflow as tf

from evener.errors import PlanError, RequestError
from evener.keras_split import compatibility
from evener.keras_split import tf_devices as names
from evener.keras_split.batch_bounds import Cut
from evener.keras_split.compatibility import SplitWarning
from evener.keras_split.data import Feed, fold_weights, given
from evener.keras_split.engines.mirrored import Mirrored, distribute, strategy_for
from evener.keras_split.engines.multiworker import Group, Workers, group_from_environment
from evener.keras_split.engines.single_device import Alone
from evener.keras_split.engines.towers import Towers
from evener.keras_split.fit_hooks import Fitting
from evener.keras_split.model_digest import model_digest
from evener.plan import Plan, load_plan
from evener.plan_check import check_fit, check_global_batch, describe
from evener.shares import is_ratio

ENGINES = ("auto", "towers", "mirrored", "multiworker")


class Split:
    """How one training lies on several devices; `build` or `model` makes a Keras model train so.

    `Split("plan.toml")` takes devices and shares from a plan. `Split(gpus=2)`, `Split(gpus=[0, 1], ratios=[768, 560])`
    mean what they meant to `multi_gpu_model`; `devices` takes TensorFlow's names instead. Make it before the model.
    PlanError, RequestError or DeviceError if it can't be done; SplitWarning, or PlanError with `strict`, where the plan
    was made for something else.
    """

    def __init__(
        self,
        plan: Plan | str | PathLike[str] | None = None,
        *,
        gpus: int | Sequence[int] | None = None,
        devices: Sequence[str] | None = None,
        ratios: Sequence[float] | None = None,
        global_batch: int | None = None,
        engine: str = "auto",
        strict: bool = False,
    ) -> None:
        if engine not in ENGINES:
            raise RequestError(f"There is no engine {engine!r}.", f"Choose one of {', '.join(ENGINES)}.")
        compatibility.check_backend()
        _check_one(plan, gpus, devices)
        if plan is not None and ratios is not None:
            raise RequestError("Both a plan and ratios are given.", "Give one of them; the plan has its own ratios.")
        self.plan = plan if plan is None or isinstance(plan, Plan) else load_plan(plan)
        self.strict = strict
        self.group = group_from_environment() if engine in ("auto", "multiworker") else None
        self.engine, self.why = _choose(engine, self.plan, self.group)
        if self.engine == "multiworker":
            _ = self.required_group
        self.devices, self.cut, self.global_batch = self._lay(gpus, devices, ratios, global_batch)
        if engine == "auto" and len(self.devices) == 1 and self.group is None:
            self.engine, self.why = "solo", "One device computes, so there is nothing to split."
        if self.global_batch is not None:
            self.global_batch = check_global_batch(self.global_batch, len(self.devices))
        if self.group is None:
            names.check_present(self.devices)
        elif self.group.size != len(self.devices):
            raise RequestError(
                f"TF_CONFIG names {self.group.size} processes, the split {len(self.devices)} devices.",
                "Start one process for each device.",
            )
        self.strategy = strategy_for(self.devices) if self.engine == "mirrored" else None
        if self.plan is not None and (self.group is None or self.group.rank == 0):
            _warn_of_limits(self.plan)

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a whole global batch for each device that computes; without one, the ratios in whole numbers."""
        return self.cut.sizes(self.global_batch) if self.global_batch else self.cut.weights

    def scope(self) -> AbstractContextManager[Any]:
        """Where the model and its optimizer are to be made: the mirrored strategy's scope, or the first device."""
        if self.strategy is not None:
            scope: AbstractContextManager[Any] = self.strategy.scope()
            return scope
        return nullcontext() if self.group else tf.device(self.devices[0])

    def build(self, make_model: Callable[[], Any]) -> Any:
        """Call `make_model` where its weights belong, and `model` on what it gives."""
        with self.scope():
            return self.model(make_model())

    def model(self, model: Any) -> Any:
        """Make this very model train, evaluate and predict over the devices; it is saved and loaded as before."""
        compatibility.check_model(model)
        if self.strategy is not None and model.distribute_strategy is not self.strategy:
            raise RequestError(
                "engine='mirrored' needs the model to be made in its scope.",
                "Use split.build(make_model), or make it inside `with split.scope():`.",
            )
        self._compare(model)
        match self.engine:
            case "solo":
                alone = Alone(model, self.devices[0])
                Fitting(self, model, alone, partial(compatibility.check_compiled, model)).attach()
            case "towers":
                towers = Towers(model, self.devices, self.cut)
                Fitting(self, model, towers, partial(compatibility.check_towers, model)).attach()
            case "mirrored":
                Fitting(self, model, Mirrored(model), partial(compatibility.check_mirrored, model)).attach()
            case "multiworker":
                workers = Workers(model, self.cut, self.required_group)
                Fitting(self, model, workers, partial(compatibility.check_workers, model)).attach()
        return model

    def data(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        class_weight: Mapping[int, float] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Any:
        """A dataset of whole global batches of these arrays: each sample once an epoch, the short last batch too.

        With `shuffle` each epoch has another order, the same in every process of a group.
        """
        size = batch_size or self.global_batch
        if size is None:
            raise RequestError("This split has no global batch.", "Give batch_size, or Split(global_batch=...).")
        size = check_global_batch(size, len(self.devices))
        weight = fold_weights(y, sample_weight, class_weight)
        return Feed(given(x, y, weight), size, shuffle, seed).whole()

    def batches(self, feed: Feed, endless: bool = False) -> Any:
        """A feed's batches in the form that the engine's steps take: whole, dealt to replicas, or own rows."""
        if self.engine == "multiworker":
            return feed.own(self.cut, self.required_group.rank, endless)
        return self.deal(feed.whole(endless))

    def deal(self, dataset: Any) -> Any:
        """A dataset of whole batches in the form that the engine's steps take."""
        return dataset if self.strategy is None else distribute(self.strategy, dataset, self.cut)

    @property
    def required_group(self) -> Group:
        """The group of engine multiworker."""
        if self.group is None:
            raise RequestError(
                "engine='multiworker' needs a process for each device.",
                "Set TF_CONFIG in each, or use engine='towers' in one process.",
            )
        return self.group

    def _lay(
        self,
        gpus: int | Sequence[int] | None,
        devices: Sequence[str] | None,
        ratios: Sequence[float] | None,
        global_batch: int | None,
    ) -> tuple[tuple[str, ...], Cut, int | None]:
        """The devices that compute, how a batch is cut for them, and the global batch where there is one."""
        if self.plan is not None:
            size = self.plan.layout.global_batch
            if global_batch is not None:
                size = check_global_batch(global_batch, len(self.plan.layout.active))
            return self._devices_of(self.plan), Cut([share for share in self.plan.shares(size) if share]), size
        chosen = names.names_of_gpus(gpus) if gpus is not None else names.names_of_request(devices or ())
        return chosen, _seed_cut(chosen, ratios), global_batch

    def _devices_of(self, plan: Plan) -> tuple[str, ...]:
        if self.group is None:
            return names.names_of_plan(plan)
        check_fit(plan, devices=None, world=self.group.size, workload_digest=None, strict=False)
        return tuple(share.device for share in plan.layout.active)

    def _compare(self, model: Any) -> None:
        """Say how the model differs from the one that the plan was measured with."""
        plan = self.plan
        if plan is None:
            return
        if plan.framework not in ("tensorflow", "none"):
            raise PlanError(f"The plan was measured with {plan.framework}.", "Make one with --framework tensorflow.")
        digest = model_digest(model) if model.built else None
        found = list(check_fit(plan, devices=None, world=None, workload_digest=digest, strict=self.strict))
        policy = model.dtype_policy.name
        if policy != plan.precision:
            found.append(f"The plan was measured in {plan.precision}, this model is {policy}.")
        if plan.xla and len(self.devices) > 1:
            found.append("The plan was measured with XLA, which a split can't use.")
        found += self._other_gpus(plan)
        if found and self.strict:
            raise PlanError(" ".join(found), "Make a plan for this training, or don't ask for strict.")
        for sentence in found:
            warnings.warn(sentence, SplitWarning, stacklevel=4)

    def _other_gpus(self, plan: Plan) -> list[str]:
        """GPUs whose product name isn't the plan's."""
        gpus = {
            names.short_name(d.name).removeprefix("physical_device:"): d for d in tf.config.list_physical_devices("GPU")
        }
        found = []
        for name, share in zip(self.devices, plan.layout.active, strict=True):
            here = tf.config.experimental.get_device_details(gpus[name]).get("device_name") if name in gpus else None
            if here and here not in share.name and share.name not in here:
                found.append(f"The plan's {name} is a {share.name}, this machine's a {here}.")
        return found


def _warn_of_limits(plan: Plan) -> None:
    """A training is not slowed or capped as the probes were; another split may then be the fastest."""
    held = ", ".join(f"{describe(share)} to {share.limit}" for share in plan.layout.active if share.limit)
    if held:
        warnings.warn(
            f"The plan was measured with limits that this training doesn't have: {held}. "
            "Its shares are right for devices so limited only.",
            SplitWarning,
            stacklevel=3,
        )


def _check_one(plan: object, gpus: object, devices: object) -> None:
    if sum(given is not None for given in (plan, gpus, devices)) != 1:
        raise RequestError(
            "A Split needs a plan, or gpus, or devices, and only one of them.",
            'Write Split("plan.toml") or Split(gpus=2).',
        )


def _choose(engine: str, plan: Plan | None, group: Group | None) -> tuple[str, str]:
    """The engine and, in a sentence, why it is that one."""
    if engine != "auto":
        return engine, f"engine={engine!r} was asked for."
    if group is not None:
        return "multiworker", f"TF_CONFIG names {group.size} processes."
    if plan is not None and plan.layout.engine == "mirrored":
        return "mirrored", "The plan was measured with it."
    if plan is not None and plan.layout.engine == "multiworker":
        return "towers", "The plan was measured with a process for each device; this is one process, without TF_CONFIG."
    return "towers", "One process, and exact for all but BatchNormalization."


def _seed_cut(devices: Sequence[str], ratios: Sequence[float] | None) -> Cut:
    """The floor of each part, the rest to the last; RequestError unless each device has a ratio above 0."""
    chosen = [1.0] * len(devices) if ratios is None else list(ratios)
    if len(chosen) != len(devices):
        raise RequestError(f"There are {len(devices)} devices and {len(chosen)} ratios.", "Give one for each device.")
    for ratio in chosen:
        if not is_ratio(ratio) or ratio == 0:
            raise RequestError(f"A ratio of {ratio!r} gives a device no samples.", "Leave that device out.")
    return Cut(chosen, floors=True)
