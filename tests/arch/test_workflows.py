"""Workflows run code of this repository, by actions that nobody can change afterwards."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.name: path.read_text() for path in (REPO / ".github" / "workflows").glob("*.yml")}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def test_actions_are_pinned_by_commit() -> None:
    """Each action is pinned by commit, with its version as a comment."""
    uses = [
        line.strip()
        for text in WORKFLOWS.values()
        for line in text.splitlines()
        if re.search(r"uses: [^$]", line)
    ]
    assert len(uses) > 6
    assert [line for line in uses if not re.search(r"@[0-9a-f]{40} # v\d+(\.\d+)+$", line)] == []


def test_what_they_run_is_there() -> None:
    """The scripts of .ci/, make targets, extras and Python versions of workflows exist."""
    text = "\n".join(WORKFLOWS.values())
    scripts = set(re.findall(r"\.ci/\w+", text))
    assert scripts == {".ci/run", ".ci/package"}
    assert ".ci/package" in (REPO / ".ci" / "run").read_text()
    assert all((REPO / name).stat().st_mode & 0o111 for name in scripts)
    targets = set(re.findall(r"^(\w+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)", text)) <= targets
    extras = {
        name for found in re.findall(r"-e \"\.\[([\w,-]+)\]", text) for name in found.split(",")
    }
    assert extras <= set(PROJECT["optional-dependencies"])
    claimed = {
        each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)
    }
    assert set(re.findall(r"^ +(3\.\d+)$", WORKFLOWS["ci.yml"], re.MULTILINE)) == claimed


def test_a_release_is_tested_first() -> None:
    """A release runs all CI tests at its tag first."""
    assert re.search(
        r"  tests:\n.*?uses: \$/\.github/workflows/ci\.yml\n", WORKFLOWS["release.yml"], re.DOTALL
    )
    assert re.search(r"  build:\n(    .*\n)*    needs: tests\n", WORKFLOWS["release.yml"])
    assert re.search(r"  publish:\n(    .*\n)*    needs: build\n", WORKFLOWS["release.yml"])


def test_a_release_needs_the_owner() -> None:
    """PyPI refuses the package until the owner removes one line, which CONTRIBUTING names."""
    assert "Private :: Do Not Upload" in PROJECT["classifiers"]
    assert '"Private :: Do Not Upload"' in (REPO / "CONTRIBUTING.md").read_text()
    assert "urls" not in PROJECT
