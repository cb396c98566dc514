"""The reference pages of the site: commands from the program's own parser, files and Python from
the source.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_group

from evener.tui.cli.main import app

REPO = Path(__file__).resolve().parents[1]
FILES = (  # heading, what it is, the module, its structs
    (
        "Plan",
        "What `--export` writes; [by hand](../plan.md) a few of the keys are enough.",
        "evener/plan/file.py",
        ("Plan", "Throughput", "Evidence", "SearchSummary", "Fingerprint"),
    ),
    (
        "Layout of a plan",
        "The key `layout`, and that of each piece of evidence.",
        "evener/plan/layout.py",
        ("PlanLayout", "Share"),
    ),
    (
        "Cost of a pass",
        "The key `cost` of a share, where rows are of unequal length.",
        "evener/shares/curves.py",
        ("Cost",),
    ),
    (
        "Live file",
        "What a training that reports itself writes, twice a second, for the "
        "monitor: one "
        "JSON object for"
        " each process, in `$XDG_RUNTIME_DIR/evener/live`, or below "
        "`~/.local/state/evener/live`. A `LiveRecord` has"
        " the keys of `Details` too.",
        "evener/live/files.py",
        ("LiveRecord", "Details", "LiveDevice", "ShareChange"),
    ),
    (
        "Noise scale",
        "The key `noise` of a live file, and `scale` of a training's journal.",
        "evener/training/noise_scale.py",
        ("NoiseScale",),
    ),
    (
        "Journal of a search",
        ("`journal.jsonl` of a run: JSON lines, which `entry` names. The first is a header."),
        "balancer/journal.py",
        ("Header", "AskedEntry", "ObservationEntry", "FactsEntry", "FailedEntry"),
    ),
    (
        "End of a search",
        "The last line of a search's journal.",
        "balancer/events.py",
        ("Finished",),
    ),
    (
        "Measurements",
        "The keys `probes` and `seen` of a search's journal.",
        "balancer/types.py",
        ("Layout", "Probe", "Timed", "OutOfMemory", "Failed"),
    ),
    (
        "Journal of a training",
        "`training.jsonl` of a run: JSON lines, which `entry` names.",
        "evener/live/journal.py",
        (
            "StartEntry",
            "SpeedEntry",
            "StepsEntry",
            "ChangeEntry",
            "RetreatEntry",
            "NoiseEntry",
            "EndEntry",
        ),
    ),
)
MODULES = ("evener", "evener.torch", "evener.keras", "evener.huggingface", "evener.ray")
ADAPTERS = {  # what a Split has of PlannedTraining for trainers' adapters
    "add_up",
    "change_shares",
    "check_whole",
    "end",
    "follow",
    "ranks",
    "sampler",
    "stay_even",
}
FUNCTIONS = {"evener.ray": ("trainer", "Checkpoint")}  # of modules that don't say what is public


def commands_page() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    lines = [
        "# Commands",
        "",
        (
            "Made from the program's own `--help`. [Options and results](../commands.md) says "
            "what they mean."
        ),
    ]
    group = get_group(app)
    context = group.make_context("evener", [], resilient_parsing=True)
    lines += ["", "## evener", "", group.help or "", "", *_options(group)]
    for name in group.list_commands(context):
        lines += _command(group.get_command(context, name), f"evener {name}", context)
    return "\n".join(lines) + "\n"


def _command(command: Any, path: str, above: Any) -> Iterator[str]:
    context = command.make_context(path.split()[-1], [], parent=above, resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (
        "",
        f"## {path}",
        "",
        _prose(command.help or ""),
        "",
        "```console",
        f"$ {path} {usage}",
        "```",
        "",
    )
    yield from _options(command)
    for name in command.list_commands(context) if hasattr(command, "commands") else ():
        yield from _command(command.get_command(context, name), f"{path} {name}", context)


def _options(command: Any) -> Iterator[str]:
    """The tables of a command's arguments and options, by their groups."""
    groups: dict[str, list[str]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name.upper()}`"
        else:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        words = _prose(getattr(parameter, "help", None) or "")
        choices = getattr(parameter.type, "choices", None)
        if choices:
            words += f" One of {', '.join(map(str, choices))}."
        default = parameter.default
        shown = (
            default is not None
            and not callable(default)
            and not isinstance(default, bool)
            and default != ""
        )
        if shown and "Default" not in words:
            words += f" Default: {default}."
        row = f"| {names} | {words.strip()} |"
        groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(row)
    for title, rows in groups.items():
        yield from (f"| {title} | |", "| --- | --- |", *rows, "")


def _prose(text: str) -> str:
    """Text of the program as Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def files_page() -> str:
    """Every key of every file, from the records that read and write them."""
    words = (
        "`s` is seconds, `at` a time in seconds since the epoch. A key with a default may "
        "be left out."
    )
    lines = [
        "# Keys of every file",
        "",
        f"Made from the records that read and write the files. {words}",
    ]
    for title, words, module, names in FILES:
        lines += ["", f"## {title}", "", words]
        for name in names:
            lines += _struct(REPO / module, name, names)
    return "\n".join(lines) + "\n"


def _struct(path: Path, name: str, names: tuple[str, ...]) -> Iterator[str]:
    text = path.read_text()
    found = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    tag = next((ast.literal_eval(word.value) for word in found.keywords if word.arg == "tag"), "")
    if tag:
        yield from ("", f'### "{tag}"')
    elif len(names) > 1:
        yield from ("", f"### {name}")
    comments = _comments(text)
    yield from ("", _prose((ast.get_docstring(found) or "").replace("\n", " ")), "")
    fields = [
        field
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    if not fields:
        return
    yield from ("| key | | type | default |", "| --- | --- | --- | --- |")
    for field in fields:
        kind = field.annotation
        if (
            isinstance(kind, ast.Subscript)
            and ast.unparse(kind.value) == "Annotated"
            and isinstance(kind.slice, ast.Tuple)
        ):
            kind = kind.slice.elts[0]
        default = f"`{ast.unparse(field.value)}`" if field.value is not None else ""
        words = _prose(comments.get(field.end_lineno or 0, ""))
        assert isinstance(field.target, ast.Name)
        yield f"| `{field.target.id}` | {words} | {_prose(ast.unparse(kind))} | {_prose(default)} |"


def _comments(text: str) -> dict[int, str]:
    """The comment on each line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = (
        (token.start[0], token.string.lstrip("# "))
        for token in tokens
        if token.type == tokenize.COMMENT
    )
    return {line: words for line, words in found if not words.startswith(("type: ignore", "noqa"))}


def python_page() -> str:
    """What a training script may import, with signatures and docstrings."""
    import griffe

    lines = [
        "# Python",
        "",
        "What a training script imports. All else is evener's own and may change.",
    ]
    loader = griffe.GriffeLoader(search_paths=[str(REPO)], allow_inspection=False)
    loader.load("evener")
    for module in MODULES:
        loaded = loader.modules_collection[module]
        lines += ["", f"## {module}", "", *_docstring(loaded)]
        for name in map(str, loaded.exports or FUNCTIONS.get(module, ())):
            if not name.startswith("__") and name in loaded.members:
                lines += _object(loaded.members[name])
    return "\n".join(lines) + "\n"


def _object(named: Any) -> Iterator[str]:
    found = named.final_target if named.is_alias else named
    yield from ("", f"### {found.name}", "")
    if found.is_function:
        yield from _code(found.signature())
    if found.is_class and "__init__" in found.members:
        yield from _code(found.members["__init__"].signature().replace("__init__", found.name, 1))
    yield from _docstring(found)
    if found.is_class:
        for name, member in found.all_members.items():
            if not name.startswith("_") and name not in ADAPTERS and member.docstring:
                yield from ("", f"#### {found.name}.{name}", "")
                yield from _code(
                    member.signature() if member.is_function else f"{name}: {member.annotation}"
                )
                yield from _docstring(member)


def _code(signature: str) -> Iterator[str]:
    """A block with a signature, a parameter on each line if it is long."""
    text = signature.removesuffix(" -> None")
    if len(text) > 90 and (found := re.fullmatch(r"([\w.]+)\((.*)\)( -> .*)?", text)):
        parameters = "".join(
            f"    {each},\n" for each in re.split(r", (?=[*\w]+(?:: |,|$| =))", found[2])
        )
        text = f"{found[1]}(\n{parameters}){found[3] or ''}"
    yield from ("```python", text, "```", "")


def _docstring(found: Any) -> Iterator[str]:
    """The docstring as Markdown: its indented examples are code."""
    text = found.docstring.value if found.docstring else ""
    yield re.sub(r"\(docs/(\w+)\.md\)", r"([\1](../\1.md))", text)
