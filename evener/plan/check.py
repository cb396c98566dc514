"""Check that a plan fits the devices, the model and the number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import PlanError
from ..shares.whole_rows import whole_number
from .file import Plan, Share


def check_fit(
    plan: Plan,
    *,
    devices: Sequence[str] | None,
    world: int | None,
    workload_digest: str | None,
    strict: bool,
    global_batch: int | None = None,
    framework: str | None = None,
) -> tuple[str, ...]:
    """Check that a plan fits a training run, and return warnings about differences.

    - `devices`: ids of the devices.
    - `world`: number of processes.
    - `workload_digest`: digest of the model.
    - `strict`: whether to raise PlanError if there are any warnings.
    - `global_batch`: rows per step; by default the plan's.
    - `framework`: "torch" or "tensorflow".

    An argument that is None isn't compared with the plan. The digest isn't compared if the plan has
    none. Raises PlanError if the plan can't be used here.
    """
    # a placement has no batches; a pack's batch is that of each of its training runs
    if plan.layout.traits.placed:
        raise PlanError(
            f"The plan places a model's parts ({plan.layout.placement}); it doesn't split a batch.",
            "Place them in the script, or make a plan that splits with evener balance.",
        )
    _check_world(plan, world, framework)
    check_global_batch(
        global_batch if global_batch is not None else plan.layout.global_batch,
        sum(map(bool, plan.layout.batches)),
    )
    warnings = tuple(_list_differences(plan, devices, workload_digest, framework))
    if strict and warnings:
        raise PlanError(
            " ".join(warnings),
            "Make a plan for what is here with evener balance, or don't ask for strict.",
        )
    return warnings


def check_global_batch(global_batch: int, devices: int) -> int:
    """Return a global batch as an int, after checking that it has a row for each device.

    `devices` is the number of devices. Raises PlanError if the batch isn't a whole number or has
    fewer rows.
    """
    whole = whole_number(global_batch)
    if whole is None or whole < devices:
        raise PlanError(
            f"A global batch of {global_batch!r} samples can't give each of {devices} devices one.",
            f"Give a whole number, {devices} or above, or a plan that leaves devices out.",
        )
    return whole


def describe(share: Share) -> str:
    """Return the label of a share's device, followed by its product name if it has one."""
    named = share.name and share.name not in (share.device, share.label)
    return f"{share.label} ({share.name})" if named else share.label


def _check_world(plan: Plan, world: int | None, framework: str | None) -> None:
    expected = len(plan.layout.active)
    if world is None or world == expected:
        return
    names = ", ".join(describe(share) for share in plan.layout.active)
    left_out = len(plan.layout.share) - expected
    note = ""
    if left_out:
        verb = "is" if left_out == 1 else "are"
        note = f" ({left_out} of its devices {verb} left out)"
    fault = (
        f"The plan trains on {expected}: {names}{note}, but the training has {world}, one "
        f"for each process."
    )
    raise PlanError(
        " ".join([*_list_differences(plan, None, None, framework), fault]),
        f"Start {expected}, as evener launch does, or make a plan for {world}.",
    )


def _list_differences(
    plan: Plan, devices: Sequence[str] | None, workload_digest: str | None, framework: str | None
) -> Iterator[str]:
    """Yield a sentence for each difference between the plan and the training run.

    Devices, model and framework are compared.
    """
    # devices are named by their ids, as `evener devices` prints them
    missing = [
        f"{share.name} ({share.device})" if share.name else share.device
        for share in plan.layout.active
        if devices is not None and share.device not in devices
    ]
    if missing:
        here = ", ".join(devices or ()) or "none"
        yield f"The plan was measured on {', '.join(missing)}, not among the devices here: {here}."
    measured = plan.fingerprint.workload_digest
    if workload_digest is not None and measured not in ("", workload_digest):
        named = f", {plan.workload}" if plan.workload else ""
        yield (
            f"The plan was measured with another model{named}: its digest is {measured}, this "
            f"one's {workload_digest}."
            " Measure this one with evener balance --workload FILE.py:FUNCTION."
        )
    if framework is not None and plan.framework not in (framework, "none", ""):
        yield f"The plan was measured with {plan.framework}, but {framework} trains."
