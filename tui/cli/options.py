"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from evener.balancer.request import Request
from evener.workloads import registry

from ..text.parsing import REQUEST_HELP, make_request
from ..text.workload_help import DEFAULTS

GROUPS = (
    "What is measured",
    "Which batches",
    "How long",
    "Where results go",
)  # the groups of options in --help
WHAT, BATCH, LENGTH, OUTPUT = (partial(typer.Option, rich_help_panel=group) for group in GROUPS)
TRAINING = (
    "devices",
    "ray_address",
    "share",
    "workload",
    "framework",
    "settings",
    "precision",
    "xla",
    "inputs",
    "engine",
)
BATCHES = (
    *(
        "global_batch",
        "max_global_batch",
        "multiple_of",
        "micro",
        "tolerance",
        "objective",
        "max_slowdown",
    ),
    *("noise_scale", "own_batch"),
)
SEARCH = (*BATCHES, "budget", "seed", "pace")
_FLAGS = {
    "devices": ("--devices", "-d"),
    "workload": ("--workload", "-w"),
    "settings": ("--set",),
    "inputs": ("--input",),
}
_MORE_HELP = {
    "workload": f" Built in: {', '.join(registry.names())}. {DEFAULTS} More: evener help workload."
}
# options whose text `make_request` parses, with their defaults
_TYPED: dict[str, tuple[Any, Any]] = {
    "framework": (str | None, None),
    "settings": (list[str] | None, None),
    "inputs": (str, "host"),
    "budget": (str, "120s"),
    "max_slowdown": (str | None, None),
    "noise_scale": (str | None, None),
}


def _request_option(name: str, declare: Callable[..., Any] = typer.Option) -> Any:
    flags = _FLAGS.get(name, (f"--{name.replace('_', '-')}",))
    return declare(*flags, help=REQUEST_HELP[name] + _MORE_HELP.get(name, ""))


DevicesOption = Annotated[str, _request_option("devices")]
RayAddressOption = Annotated[str, _request_option("ray_address")]
ExportOption = Annotated[
    Path | None, OUTPUT("--export", "-e", help="Write the plan to this .toml or .json file.")
]
JsonOption = Annotated[bool, OUTPUT("--json", help="Print one JSON object.")]
ReadonlyOption = Annotated[
    bool,
    typer.Option("--readonly", help="View only: no signals, no searches, no changes of runs."),
]
AsciiOption = Annotated[bool, typer.Option("--ascii", help="Draw with plain ASCII characters.")]
ThemeOption = Annotated[
    Literal["dark", "light", "contrast"] | None, typer.Option("--theme", help="Colours of the app.")
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `last`.")
]


def _group_of(name: str) -> Callable[..., Any]:
    """Return the function that declares an option in the right `--help` group.

    `name` is the field of `Request` that the option sets.
    """
    if name in TRAINING:
        return WHAT
    return BATCH if name in BATCHES else LENGTH


def takes_request(*names: str) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Decorator: add an option to a command for each of these fields of `Request`.

    The command gets the parsed request as its first argument, and returns its exit code. Raises
    RequestError for values that are not valid.
    """
    fields = inspect.signature(Request).parameters
    types = inspect.get_annotations(Request, eval_str=True)

    def parameter(name: str) -> inspect.Parameter:
        kind, default = _TYPED[name] if name in _TYPED else (types[name], fields[name].default)
        annotation: Any = Annotated[kind, _request_option(name, _group_of(name))]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def decorate(command: Callable[..., int]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        def run(**given: Any) -> None:
            request = make_request(**{name: given.pop(name) for name in names})
            raise typer.Exit(command(request, **given))

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        options = sorted([*map(parameter, names), *keywords], key=_help_order)
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _help_order(parameter: inspect.Parameter) -> tuple[int, bool]:
    """Return the sort key of an option in `--help`.

    Options are sorted by group, and `--seed` and `--pace` come last in their groups.
    """
    (option,) = parameter.annotation.__metadata__
    return GROUPS.index(option.rich_help_panel), parameter.name in ("seed", "pace")
