"""The options that several commands share, and their text turned into a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from evener.errors import RequestError
from evener.tui.text.formatting import parse_duration

if TYPE_CHECKING:
    from evener.balancer.session import Request

DevicesOption = Annotated[
    str,
    typer.Option(
        "--devices", "-d", help="auto | gpu | gpu:0,2 | cpu | cpu/N | sim:gtx1080ti,gtx1080; @60%+8GiB limits."
    ),
]
WorkloadOption = Annotated[
    str | None, typer.Option("--workload", "-w", help="A name, or file.py:build for your own (its code is run).")
]
FrameworkOption = Annotated[str, typer.Option("--framework", help="tensorflow or torch.")]
GlobalBatchOption = Annotated[int | None, typer.Option("--global-batch", help="Fixed samples per step.")]
MaxGlobalBatchOption = Annotated[int | None, typer.Option("--max-global-batch", help="At most so many samples.")]
MultipleOption = Annotated[int, typer.Option("--multiple-of", help="Every share is a multiple of it.")]
ObjectiveOption = Annotated[str, typer.Option("--objective", help="throughput: samples/s.")]
BudgetOption = Annotated[str, typer.Option("--budget", help="Time for probing, like 120s, 5m; none: until sure.")]
ToleranceOption = Annotated[
    float, typer.Option("--tolerance", help="Within it of the best, the smallest global batch wins.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed makes the same choices.")]
ExportOption = Annotated[Path | None, typer.Option("--export", "-e", help="Write the plan here (.toml or .json).")]
ResumeOption = Annotated[str | None, typer.Option("--resume", help="Go on with a run: its id, or `last`.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a workload's parameter: key=value.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="float32, mixed_bfloat16 or mixed_float16.")]
XlaOption = Annotated[bool, typer.Option("--xla", help="Compile the step with XLA.")]
InputOption = Annotated[str, typer.Option("--input", help="host: batches come from host memory; device: they don't.")]
EngineOption = Annotated[
    str, typer.Option("--engine", help="How TensorFlow keeps a split in step: auto, towers, mirrored or multiworker.")
]
PaceOption = Annotated[float, typer.Option("--pace", help="Simulated devices: 1 runs in real time.")]
ShareOption = Annotated[bool, typer.Option("--share", help="Run though another evener holds the devices.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

_FRAMEWORKS = ("tensorflow", "torch")


def make_request(*, settings: list[str], budget: str = "120s", inputs: str = "host", **fields: Any) -> Request:
    """The request that the options spell; RequestError names the option that is wrong."""
    from evener.balancer.session import Request

    framework = fields.get("framework", _FRAMEWORKS[0])
    if framework not in _FRAMEWORKS:
        raise RequestError(f"--framework {framework!r} is not known.", f"Choose {' or '.join(_FRAMEWORKS)}.")
    seconds = None if budget == "none" else parse_duration(budget, "--budget")
    return Request(settings=parse_settings(settings), budget_seconds=seconds, input=inputs, **fields)


def framework_of(workload: str | None, given: str | None) -> str:
    """The framework that was given, else that of the named workload, else tensorflow."""
    if given is not None or workload is None or ":" in workload:
        return given or "tensorflow"
    from evener.workloads import registry

    own = registry.find(workload).framework
    return "tensorflow" if own == "none" else own


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is a JSON scalar where it reads as one, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise RequestError(f"--set {pair!r} is not key=value.", "Write it like --set layers=4.")
        settings[key] = _value(text)
        try:
            msgspec.json.encode({key: settings[key]})
        except (ValueError, OverflowError, RecursionError):
            raise RequestError(f"--set {pair[:80]!r} can't be kept as text.", "Write it in UTF-8.") from None
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_indices(text: str | None) -> tuple[int, ...] | None:
    """`0,2` as numbers; None if not given."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"-o {text!r} is not a list of device indices.", "Write it like -o 0,2.") from None


def spread_lists(arguments: list[str]) -> list[str]:
    """`--gpus 0 1 --batches 820 568` as the parser wants it: the option again before each value."""
    spread: list[str] = []
    current, values = "", 0
    for argument in [*arguments, "--"]:
        is_option = argument.startswith("-") and not argument.lstrip("-").isdigit()
        if is_option and current and not values:
            spread.append(current)  # the parser says what is missing
        if argument in ("--gpus", "--batches"):
            current, values = argument, 0
            continue
        if is_option:
            current = ""
        values += 1
        spread += [current, argument] if current else [argument]
    return spread[:-1]
