"""A request is checked once, before a run is created, and its journal gives the same
problem again.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.balancer import journal
from evener.balancer.jobs import check_request, make_job, read_job
from evener.balancer.journal import Header
from evener.balancer.objectives import ENERGY
from evener.balancer.request import Request
from evener.balancer.run import begin
from evener.balancer.store import runs
from evener.balancer.store.runs import make_search
from evener.errors import RequestError

ROOT = Path(__file__).parents[2]
PAIR = Request("sim:gtx1080ti,gtx1080")


@pytest.mark.parametrize(
    "asked",
    [
        {"global_batch": 0},
        {"global_batch": 100, "multiple_of": 8},
        {"multiple_of": 0},
        {"max_global_batch": 0},
        {"max_global_batch": 4, "multiple_of": 8},
        {"global_batch": 64, "max_global_batch": 32},
        {"tolerance": 1.0},
        {"tolerance": -0.1},
        {"tolerance": float("nan")},
        {"budget_seconds": 0.0},
        {"budget_seconds": float("inf")},
        {"max_slowdown": 1.0},
        {"pace": -1.0},
        {"objective": "beauty"},
    ],
)
def test_a_request_that_no_search_can_meet_is_refused(asked: dict[str, Any]) -> None:
    """A request in a journal is checked too, because somebody may have changed the file."""
    request = Request(**asked)
    with pytest.raises(RequestError) as caught:
        check_request(request)
    assert caught.value.remedy
    job = make_job(PAIR)
    header = Header(
        "run", "2026-01-01T00:00:00Z", request, job.devices, job.workload, job.framework, "0"
    )
    with pytest.raises(RequestError, match=caught.value.message.partition(" ")[0]):
        read_job(header)


@pytest.mark.usefixtures("own_folder")
def test_what_the_devices_can_not_do_is_refused_before_a_run_is_made() -> None:
    with pytest.raises(RequestError, match="can't give each of 2 devices 1 or more"):
        make_job(msgspec.structs.replace(PAIR, global_batch=1))
    assert runs.list_runs() == ()


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "asked",
    [{}, {"global_batch": 512, "micro": "off"}, {"objective": ENERGY.name, "multiple_of": 4}],
)
def test_a_run_s_journal_has_the_problem_of_its_job(asked: dict[str, Any]) -> None:
    """The job of a new run and the header on disk give one problem."""
    devices = "sim:h200,h200" if asked.get("objective") else PAIR.devices
    job = make_job(msgspec.structs.replace(PAIR, devices=devices, **asked))
    run = begin(job)
    run.close()
    record = journal.read(runs.journal_path(run.record.header.run))
    assert record.header.job.problem == job.problem == make_search(run.job).problem


def test_problems_and_searches_are_made_in_one_place() -> None:
    """A problem is made from the request, a search in the replay of a record."""
    made: dict[str, set[str]] = {"Problem": set(), "Search": set()}
    for path in (path for folder in ("balancer", "tui") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in made
            ):
                made[node.func.id].add(path.relative_to(ROOT).as_posix())
    assert made["Problem"] == {"balancer/request.py"}
    assert made["Search"] == {"balancer/store/runs.py"}
