"""Checks that a result may be written to the file that was named, made before anything is measured."""

from __future__ import annotations

import tempfile
from pathlib import Path

from evener.errors import PlanError, RequestError, as_request_error
from evener.plan.file import load_plan


def check_plan_file(path: Path, option: str) -> None:
    """RequestError unless a plan can be written to `path`."""
    if path.suffix not in (".toml", ".json"):
        remedy = f"Name it {path.stem or 'plan'}.toml or {path.stem or 'plan'}.json."
        raise RequestError(f"{option} {path} ends neither in .toml nor in .json; plans are TOML or JSON.", remedy)
    with as_request_error(f"{option} {path} can't be written", "Name a file in a folder that you may write to."):
        if path.is_dir():
            raise RequestError(f"{option} {path} is a folder.", "Name a file in it.")
        tempfile.TemporaryFile(dir=path.parent).close()


def check_replaceable(path: Path, remedy: str = "Name another file.") -> None:
    """RequestError if the file is there and no plan. A plan replaces a plan: the run of the old one still has it."""
    if path.is_file():
        try:
            load_plan(path)
        except PlanError:
            raise RequestError(f"{path} is there already and is no plan.", remedy) from None


def check_new(path: Path, force: bool) -> None:
    """RequestError if the file is there, unless `force`."""
    if not force and path.exists():
        raise RequestError(f"{path} is there already.", "Add --force to replace it, or name another file.")
