"""The pages: each is in the site's menu, its paths are there, and its commands have the program's
own options.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_group

from evener.plan.file import Plan
from evener.plan.layout import PlanLayout, Share
from evener.tui.cli.main import app, spread_lists

REPO = Path(__file__).resolve().parents[2]
TO_WRITE = ("devices/amd/", "evener/NAME.py")
FOLDERS = ("balancer", "devices", "docs", "evener", "tests", "tui", "workloads")
TOP = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
PAGES = [*(REPO / name for name in TOP), *sorted((REPO / "docs").rglob("*.md"))]
MADE = re.compile(r"reference/\w+\.md|(contributing|changelog|agents)\.md")  # by docs/site.py
BLOCK = re.compile(r"^( *)```(?:sh|bash|console)?\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(evener [^`]+)`")
PLACES = re.compile(r"\b(ID|DIR|FIRST|FILE|HOST|PORT|N)\b")  # that a reader fills in
PART = re.compile(r"^Missing|requires an argument")
# more than the parser can take: a form, a version, what typer adds at the start
OPEN = re.compile(r"\.\.\.|…|COMMAND|^evener \d|NAME=|--\w+-completion")


def test_every_path_that_the_architecture_names_is_there() -> None:
    """A path from the top; a file alone is somewhere."""
    quoted = re.findall(r"`([\w/]+(?:\.\w+)?/?)`", (REPO / "docs" / "architecture.md").read_text())
    paths = {
        name
        for name in quoted
        if name.partition("/")[0] in FOLDERS and not name.startswith(TO_WRITE)
    }
    alone = {name for name in quoted if re.fullmatch(r"\w+\.py", name)}
    there = {path.name for folder in FOLDERS for path in (REPO / folder).rglob("*.py")}
    assert len(paths) > 40
    assert len(alone) > 20
    assert sorted(path for path in paths if not (REPO / path).exists()) == []
    assert sorted(alone - there) == []


def _menu(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            yield from _menu(target) if isinstance(target, list) else (target,)


def test_every_page_is_in_the_menu_once() -> None:
    """And the menu has no page that isn't there; those that the site makes are its own test."""
    menu = list(_menu(tomllib.loads((REPO / "zensical.toml").read_text())["project"]["nav"]))
    pages = [str(path.relative_to(REPO / "docs")) for path in (REPO / "docs").rglob("*.md")]
    assert sorted(name for name in menu if not MADE.fullmatch(name)) == sorted(pages)


def _commands() -> Iterator[tuple[str, str, bool]]:
    """(page, command, whether it is whole) of each in a block or in a line; output in a console
    block is none.
    """
    for path in PAGES:
        page = str(path.relative_to(REPO))
        content = path.read_text()
        lines = INLINE.findall(re.sub(r"\s*\n\s*", " ", BLOCK.sub("", content)))
        yield from (
            (page, line.replace("\\|", "|"), False) for line in lines if not OPEN.search(line)
        )
        for _, block in BLOCK.findall(content):
            prompted = re.search(r"^\s*\$ ", block, re.MULTILINE)
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip()
                if prompted and not text.startswith("$ "):
                    continue
                text = text.removeprefix("$ ")
                if re.match(r"(\w+=\S+ )*(\S*/)?evener( |$)", text) and not OPEN.search(text):
                    yield page, text, True


COMMANDS = sorted(set(_commands()))


def test_there_are_commands_to_check() -> None:
    """The blocks are found at all."""
    assert len(COMMANDS) > 100
    assert {"README.md", "docs/index.md", "docs/slow.md"} <= {page for page, _, _ in COMMANDS}


@pytest.mark.parametrize("page", sorted({page for page, _, _ in COMMANDS}))
def test_commands_have_options_that_there_are(page: str) -> None:
    """The program's own parser takes each of them; it is not run. In a line, an argument may be
    missing.
    """
    wrong = [
        f"{text}: {fault}"
        for where, text, whole in COMMANDS
        if where == page and (fault := _find_fault(text)) and (whole or not PART.search(fault))
    ]
    assert wrong == []


def _find_fault(text: str) -> str:
    """What the parser says against a command; empty if nothing."""
    words = shlex.split(text, comments=True)
    arguments = words[
        next(i for i, word in enumerate(words) if word.rpartition("/")[2] == "evener") + 1 :
    ]
    for stop in ("|", ">", "2>", "&", "&&"):
        arguments = arguments[: arguments.index(stop)] if stop in arguments else arguments
    arguments = [PLACES.sub("1", word) for word in arguments]
    group: Any = get_group(app)
    rest = arguments if arguments[:1] in (["launch"], ["run"]) else spread_lists(arguments)
    try:
        context = group.make_context("evener", list(rest))
        while (rest := [*getattr(context, "_protected_args", ()), *context.args]) and hasattr(
            group, "commands"
        ):
            name, group, rest = group.resolve_command(context, rest)
            context = group.make_context(name, rest, parent=context)
    except Exception as error:  # the parser's own classes are private to typer
        describe = getattr(error, "format_message", error.__repr__)
        return str(describe())
    return ""


def test_an_option_that_is_not_there_is_found() -> None:
    """Of a command, of a command below one, and of the app itself."""
    for text in (
        "evener balance --exports plan.toml",
        "evener runs delete --all",
        "evener --webs",
        "evener ballance",
    ):
        assert _find_fault(text)
    assert not _find_fault("evener runs delete last --yes")


def test_modules_and_targets_that_pages_name_are_there() -> None:
    """`python -m benchmarks.…`, scripts of examples/, and what make makes."""
    text = "\n".join(path.read_text() for path in PAGES)
    modules = set(re.findall(r"-m ((?:benchmarks|docs|tests\.arch)\.\w+)", text))
    assert len(modules) > 20
    assert (
        sorted(name for name in modules if not (REPO / f"{name.replace('.', '/')}.py").exists())
        == []
    )
    assert (
        sorted(
            name
            for name in set(re.findall(r"\bexamples/\w+\.py", text))
            if not (REPO / name).exists()
        )
        == []
    )
    targets = set(re.findall(r"^(\w+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make (\w+)`", text)) <= targets


def test_the_plans_page_has_every_key() -> None:
    """Those of the file, its layout and its shares."""
    page = (REPO / "docs/plan.md").read_text()
    for record in (Plan, PlanLayout, Share):
        names = {field.name for field in msgspec.structs.fields(record)}
        assert {name for name in names if not re.search(rf"[`.\[]{name}\b", page)} == set()
