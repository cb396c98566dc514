"""`evener launch`: a training by a plan, a process for each of its devices."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from evener.balancer.number_format import duration, write_share
from evener.errors import RequestError

from ..launch.job import HostJob, make_job
from ..text.formatting import plain
from ..text.parsing import parse_duration
from .options import RayAddressOption

app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The file that --export wrote.")],
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT ARGS...", help="Or: -m MODULE ARGS...")],
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", min=0, help="How often to restart all processes, on the devices left, if one is killed."
        ),
    ] = 0,
    host: Annotated[
        str | None, typer.Option("--host", help="Which host of the plan this is. Default: found by name and address.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option("--rendezvous", help="HOST:PORT where hosts find each other. Default: the first host, 29400."),
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", help="How long to wait for all hosts, like 10m. PyTorch only.")
    ] = "60s",
    ray: Annotated[
        bool, typer.Option("--ray", help="Start it on all hosts of the plan, through their Ray cluster.")
    ] = False,
    ray_address: RayAddressOption = "",
) -> int:
    """Train by a plan: start the script once for each of its devices, as torchrun does; for Keras with TF_CONFIG.

    Split() and with_plan(Trainer) in the script find the plan by themselves.
    """
    wait_seconds = parse_duration(wait, "--wait")
    if ray and host is not None:
        raise RequestError("--host says which host this is, and --ray starts all of them.", "Give one of them.")
    if ray:
        from ..launch.cluster import launch_on_cluster

        return launch_on_cluster(plan, script, max_restarts, rendezvous, ray_address, wait_seconds)
    from ..launch.processes import named_output
    from ..launch.restarts import run_job, say

    job = make_job(plan, script, host, rendezvous, wait_seconds)
    if rendezvous is None:
        _say_other_hosts(job, max_restarts)
    say(f"{_name(job)} starts: {_list_shares(job)}")
    began = time.monotonic()
    with named_output(job.names) as output:
        code = run_job(msgspec.structs.replace(job, output=output), max_restarts)
    if not code:
        say(f"{_name(job)} has ended, after {duration(time.monotonic() - began)}")
    return code


def _name(job: HostJob) -> str:
    """The script without its folder, or -m and the module."""
    return " ".join(job.command[:2]) if job.command[0] == "-m" else Path(job.command[0]).name


def _list_shares(job: HostJob) -> str:
    """5 rows on CPU:0, 2 × 410 on GPU:1."""
    devices = (device for process in job.processes for device in process)
    pairs = zip(job.own, devices, strict=True)
    return ", ".join(f"{write_share(share.batch, share.micro)} rows on {device.label}" for share, device in pairs)


def _say_other_hosts(job: HostJob, max_restarts: int) -> None:
    """Print what to run on each other host."""
    restarts = ["--max-restarts", str(max_restarts)] if max_restarts else []
    for other in job.hosts:
        if other != job.host:
            place = ["--host", other, "--rendezvous", "{}:{}".format(*job.meeting)]
            script, *words = job.command
            script = script if script == "-m" else str(Path(script).absolute())
            line = shlex.join(["evener", "launch", *restarts, *place, str(job.path), script, *words])
            print(f"evener: on {plain(other)} run: {plain(line)}", file=sys.stderr, flush=True)
