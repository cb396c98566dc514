"""`Split`: train a Keras model with each batch divided unequally among devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import keras
import tensorflow as tf

from ..errors import PlanError, RequestError
from ..plan.check import check_fit, check_global_batch, describe
from ..plan.file import Plan, Share, load_plan
from ..plan.use import note_use
from ..shares.divisions import Cut
from ..shares.whole_rows import is_ratio
from ..training.launched import launched_plan
from ..training.row_assignment import make_row_assigner
from . import tf_devices
from .compatibility import check_backend, check_model, model_digest, warn, warn_small_data
from .data import ArrayBatches, batch_rows, batch_samples, gives_batches, pack_arrays, read_lengths
from .engine import Engine, Solo
from .fit_hooks import FitHooks
from .group import Group, check_options, group_from_environment, order_by_device
from .multiworker import Workers
from .rebalancing import ChangingCut, GroupRebalancer
from .towers import Towers

ENGINES = ("auto", "towers", "multiworker")
ONE_PROCESS = (
    "The plan was measured with a process for each device; this is one process, without TF_CONFIG."
)


class Split:
    """Divides the batches of Keras models among devices.

    Create it before the model, and then pass the model to `build` or `model`.

    - `plan`: a Plan or its file; None takes the plan of `evener launch`.
    - `gpus`: number of GPUs, or their indices, instead of a plan.
    - `devices`: TensorFlow device names, such as "GPU:0", instead of a plan.
    - `ratios`: relative shares of `gpus` or `devices`; equal by default.
    - `global_batch`: rows of a training step; by default the plan's.
    - `engine`: "towers" for one process, "multiworker" for a process per device, or "auto", which
      chooses based on the environment variable TF_CONFIG.
    - `strict`: raise PlanError instead of a SplitWarning if the plan doesn't fit exactly, for
      example because it was made for another model.
    - `rebalance`: change the shares during training; needs "multiworker".
    - `noise`: refused, because a noise scale is measured in PyTorch only.

    Raises RequestError, PlanError or DeviceError if the devices can't train as requested.
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
        rebalance: bool = False,
        noise: bool = False,
    ) -> None:
        _check_arguments(engine, noise)
        check_backend()
        note_use()  # also for ratios, which count as a plan
        self.plan = _read_plan(plan, gpus, devices, ratios)
        self.strict = strict
        self.survives = True  # True: a pass that runs out of memory is retried
        self.audited = True  # True: in some steps, gradients are compared with one device's
        self._inputs: Any = None  # the inputs of the last model
        self.group = group_from_environment() if engine in ("auto", "multiworker") else None
        self.rank_shares: tuple[Share, ...] = ()  # the plan's shares by rank; empty otherwise
        self.devices, self.cut, self.global_batch = self._divide_batch(
            gpus, devices, ratios, global_batch
        )
        is_whole = len(self.devices) == 1 and not self.cut.in_passes
        self.engine, self.why = _choose_engine(engine, self.plan, self.group, is_whole)
        self._check_processes()
        if self.global_batch is not None:
            self.global_batch = check_global_batch(self.global_batch, len(self.devices))
        self._changing = self._make_changing_cut(rebalance)
        if self.plan is not None and (self.group is None or self.group.rank == 0):
            _warn_of_limits(self.plan)
            self._warn_of_engine(self.plan.layout.engine)

    def _check_processes(self) -> None:
        """Raise an error if devices and processes don't match.

        Each device needs a process, or has to be visible to the only process.
        """
        if self.engine == "multiworker" and len(self.devices) != self.required_group.size:
            raise RequestError(
                f"TF_CONFIG names {self.required_group.size} processes, the split"
                f" {len(self.devices)} devices.",
                "Start one process for each device.",
            )
        if self.group is None:
            tf_devices.check_present(self.devices)

    def _make_changing_cut(self, rebalance: bool) -> ChangingCut | None:
        """Return a division of batches that can change during training; None without `rebalance`.

        Raises RequestError if the engine can't change shares during training.
        """
        if self.engine == "multiworker":
            check_options({"rebalance": rebalance}, self.required_group)
        # a single device has nothing to divide
        if not rebalance or self.engine == "solo":
            return None
        if self.engine != "multiworker":
            raise RequestError(
                f"rebalance looks at each device's own work, and engine={self.engine!r} has one"
                f" process, whose towers wait for each other between their forward and backward"
                f" passes: the times of its steps don't show which is slow.",
                "Start a process for each device with evener launch, or leave it out.",
            )
        if self.global_batch is None:
            raise RequestError(
                "rebalance=True needs a global batch.", "Give global_batch, or a plan."
            )
        self.cut = changing = ChangingCut(self.shares, self.cut.micros)
        return changing

    def _warn_of_engine(self, measured: str) -> None:
        """Warn if the plan was measured with another engine, so that the samples/s may differ."""
        if self.why == ONE_PROCESS:
            warn(
                f"{self.why} Expect other samples/s, or start one for each as in docs/training.md."
            )
        elif measured not in ("", self.engine) and self.engine != "solo":
            warn(
                f"The plan was measured with engine={measured!r}, this is {self.engine!r}: "
                f"expect other samples/s."
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of each device in a step, or the ratios if there is no global batch."""
        return self.cut.sizes(self.global_batch) if self.global_batch else self.cut.weights

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to create the model and its optimizer.

        It selects the first device. If there is a process for each device, it does nothing.
        """
        return nullcontext() if self.group else tf.device(self.devices[0])

    def build(self, make_model: Callable[[], Any] | keras.Model) -> Any:
        """Make a model train on the split's devices, and return the model.

        `make_model` is a compiled model, or a function that returns one and is called within
        `scope()`.
        """
        if isinstance(make_model, keras.Model) or not callable(make_model):
            return self.model(make_model)
        with self.scope():
            return self.model(make_model())

    def model(self, model: Any) -> Any:
        """Make a compiled model train, evaluate and predict with the split, and return it.

        Raises PlanError, or warns, if the plan was made for another model. Saving and loading the
        model work as before.
        """
        check_model(model)
        self._check_against_plan(model)
        self._inputs = getattr(model, "inputs", None) if model.built else None
        FitHooks(self._make_engine(model), self).attach()
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
        lengths: Any = None,
    ) -> Any:
        """Return a dataset of global batches.

        - `x`: arrays, or a `tf.data.Dataset` that includes labels and weights.
        - `sample_weight`, `class_weight`: as in `Model.fit`.
        - `batch_size`: rows in a batch; by default the global batch.
        - `shuffle`: use a different order of rows in each epoch, which depends on `seed` and is the
          same in all processes.
        - `lengths`: token count of each padded row. Each device then gets rows of similar length,
          cut to its longest one.

        Each epoch has every row once, and its last batch may be shorter. A `tf.data.Dataset` may
        have single rows or batches of any size, and keeps its order. Raises RequestError without a
        batch size, or if the arguments can't be combined.
        """
        size = batch_size or self.global_batch
        if size is None:
            raise RequestError(
                "This split has no global batch.", "Give batch_size, or Split(global_batch=...)."
            )
        size = check_global_batch(size, len(self.devices))
        if not isinstance(x, tf.data.Dataset):
            arrays = ArrayBatches(
                pack_arrays(x, y, sample_weight, class_weight), size, shuffle, seed
            )
            warn_small_data(arrays.rows, size if self.plan else None)
            return (
                arrays.global_batches()
                if lengths is None
                else self._assign_rows(arrays, x, lengths)
            )
        if shuffle or any(each is not None for each in (y, sample_weight, class_weight, lengths)):
            raise RequestError(
                "A dataset comes with its own labels, weights and order, and its rows can't "
                "be assigned by length.",
                (
                    "Put them into it: dataset.map(...), dataset.shuffle(...). Rows with lengths "
                    "have to be arrays."
                ),
            )
        batched = gives_batches(x, self._inputs)
        if batched is None:
            raise RequestError(
                "The dataset's shapes don't say whether it gives batches or single samples.",
                "Call split.build first, or leave the batch size open: dataset.batch(n).",
            )
        if not batched:
            return batch_samples(x, size, self._inputs)
        return x if batch_rows(x) == size else x.rebatch(size)

    def _assign_rows(self, arrays: ArrayBatches, x: Any, lengths: Any) -> Any:
        """Return a dataset whose rows are assigned to devices by their token counts, `lengths`.

        Raises RequestError if the engine can't assign rows by length, or if shares are computed in
        passes.
        """
        # with engine solo, there is nothing to assign
        if self.engine not in ("solo", "towers") or self.cut.in_passes:
            who = "A plan with passes" if self.cut.in_passes else f"engine={self.engine!r}"
            raise RequestError(
                f"{who} can't assign rows by length: all of them have to come together before "
                f"the loss, as in towers.",
                (
                    "Use engine='towers' and a plan without passes (evener balance --micro off), "
                    "or leave lengths out."
                ),
            )
        assigner = make_row_assigner(self.cut.weights, self.cut.weights, ())
        tokens = read_lengths(lengths, x, arrays.rows, assigner)
        return (
            arrays.global_batches()
            if self.engine == "solo"
            else arrays.assigned_rows(tokens, assigner)
        )

    @property
    def required_group(self) -> Group:
        """The processes that train together.

        Raises RequestError if there is only one process.
        """
        if self.group is None:
            raise RequestError(
                "engine='multiworker' needs a process for each device.",
                "Set TF_CONFIG in each, or use engine='towers' in one process.",
            )
        return self.group

    def _make_engine(self, model: Any) -> Engine:
        """Return the engine that runs the steps of this model."""
        if self.engine == "solo":
            return Solo(model, self.devices, self.cut)
        if self.engine == "towers":
            return Towers(model, self.devices, self.cut)
        group = self.required_group
        rule = None
        if self._changing is not None:
            rule = GroupRebalancer(self._changing, self.rank_shares, group.rank)
        own = self.devices[group.rank]
        if self.rank_shares:
            own = describe(self.rank_shares[group.rank])
        workers = Workers(model, self.cut, group, rule, own)
        if not self.survives:
            workers.limit = None
        return workers

    def _divide_batch(
        self,
        gpus: int | Sequence[int] | None,
        devices: Sequence[str] | None,
        ratios: Sequence[float] | None,
        global_batch: int | None,
    ) -> tuple[tuple[str, ...], Cut, int | None]:
        """Return the devices, the division of batches among them, and the global batch in rows.

        The global batch is None if neither the plan nor the caller specifies it.
        """
        if self.plan is None:
            chosen = (
                tf_devices.name_gpus(gpus)
                if gpus is not None
                else tf_devices.name_devices(devices or ())
            )
            return chosen, _cut_by_ratios(chosen, ratios), global_batch
        return self._divide_by_plan(self.plan, global_batch)

    def _divide_by_plan(
        self, plan: Plan, global_batch: int | None
    ) -> tuple[tuple[str, ...], Cut, int]:
        """Return the plan's devices, the division of batches, and the global batch in rows."""
        active = plan.layout.active
        size = plan.layout.global_batch
        if global_batch is not None:
            size = check_global_batch(global_batch, len(active))
        shares = [each for each in plan.shares(size) if each]
        micros = [each for each in plan.micros(size) if each]
        if self.group is None:
            return tf_devices.name_plan_devices(plan), _cut_in_passes(shares, micros), size
        check_fit(plan, devices=None, world=self.group.size, workload_digest=None, strict=False)
        # in a group, devices and shares are in rank order
        order = order_by_device(active, self.group)
        self.rank_shares = tuple(active[place] for place in order)
        cut = _cut_in_passes([shares[n] for n in order], [micros[n] for n in order])
        return tuple(share.device for share in self.rank_shares), cut, size

    def _check_against_plan(self, model: Any) -> None:
        """Check that the plan was made for this model, framework and hardware.

        Differences raise PlanError if `strict` is set, and otherwise lead to warnings. A plan for
        another framework always raises PlanError.
        """
        plan = self.plan
        if plan is None:
            return
        if plan.framework not in ("tensorflow", "none"):
            raise PlanError(
                f"The plan was measured with {plan.framework}.",
                "Make one with --framework tensorflow.",
            )
        digest = model_digest(model) if model.built else None
        found = list(
            check_fit(plan, devices=None, world=None, workload_digest=digest, strict=self.strict)
        )
        policy = model.dtype_policy.name
        # a plan written by hand wasn't measured
        if plan.throughput.samples_per_second and policy != plan.precision:
            found.append(f"The plan was measured in {plan.precision}, this model is {policy}.")
        if plan.xla and self.engine != "solo":
            found.append(
                "The plan was measured with XLA, which neither a split nor passes can use."
            )
        found += tf_devices.compare_gpus(self.devices, plan)
        if found and self.strict:
            raise PlanError(
                " ".join(found), "Make a plan for this training, or don't ask for strict."
            )
        for sentence in found:
            warn(sentence)


def _warn_of_limits(plan: Plan) -> None:
    """Warn if the plan was measured with limits on devices, such as less memory.

    This training has no such limits, so other shares may be faster.
    """
    # such as the memory in `gpu:0@24GiB`
    limited = ", ".join(
        f"{describe(share)} to {share.limit}" for share in plan.layout.active if share.limit
    )
    if limited:
        warn(
            f"The plan was measured with limits that this training doesn't have: {limited}. "
            "Its shares are right only for devices with these limits."
        )


def _check_arguments(engine: str, noise: bool) -> None:
    if engine not in ENGINES:
        raise RequestError(
            f"There is no engine {engine!r}.", f"Choose one of {', '.join(ENGINES)}."
        )
    if noise:
        raise RequestError(
            "No noise scale is measured in Keras; ranks of PyTorch measure one.",
            "Leave noise out.",
        )


def _read_plan(plan: Any, gpus: object, devices: object, ratios: object) -> Plan | None:
    """Return the plan, or None if devices are given instead.

    Raises RequestError unless exactly one of `plan`, `gpus` and `devices` is given, or if ratios
    are given with a plan.
    """
    if not isinstance(plan, Plan) and gpus is None and devices is None:
        plan = launched_plan(plan)
    if sum(given is not None for given in (plan, gpus, devices)) != 1:
        raise RequestError(
            "A Split needs a plan, or gpus, or devices, and only one of them.",
            'Write Split("plan.toml") or Split(gpus=2), or start the script with evener launch.',
        )
    if plan is not None and ratios is not None:
        raise RequestError(
            "Both a plan and ratios are given.", "Give one of them; the plan has its own ratios."
        )
    return plan if plan is None or isinstance(plan, Plan) else load_plan(plan)


def _choose_engine(
    requested: str, plan: Plan | None, group: Group | None, is_whole: bool
) -> tuple[str, str]:
    """Return the name of the engine to use, and the reason for the choice.

    `requested` is the user's choice, or "auto". `is_whole` is True if one device computes each
    batch in one pass.
    """
    if requested != "auto":
        return requested, f"engine={requested!r} was requested."
    if group is not None:
        return "multiworker", f"TF_CONFIG names {group.size} processes."
    if is_whole:
        return "solo", "One device computes, so there is nothing to split."
    if plan is not None and plan.layout.engine == "multiworker":
        return "towers", ONE_PROCESS
    return "towers", "One process, and exact for all but BatchNormalization."


def _cut_in_passes(shares: list[int], micros: list[int]) -> Cut:
    """Return a division of batches in which devices may compute their shares in several passes.

    `shares` are the rows of each device, and `micros` the maximum rows of each device's passes.
    """
    # without passes if each share is a single one
    return Cut(shares, micros=() if micros == shares else micros)


def _cut_by_ratios(devices: Sequence[str], ratios: Sequence[float] | None) -> Cut:
    """Return a division of batches among devices by relative shares; None makes them equal.

    Raises RequestError if there isn't one positive ratio for each device.
    """
    # Each device's rows are rounded down, and the last device gets the rest.
    chosen = [1.0] * len(devices) if ratios is None else list(ratios)
    if len(chosen) != len(devices):
        raise RequestError(
            f"There are {len(devices)} devices and {len(chosen)} ratios.",
            "Give one for each device.",
        )
    for ratio in chosen:
        if not is_ratio(ratio) or ratio == 0:
            raise RequestError(
                f"A ratio of {ratio!r} gives a device no samples.", "Leave that device out."
            )
    return Cut(chosen, rounds_down=True)
