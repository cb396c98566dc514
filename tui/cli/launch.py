"""The commands `launch` and `run`, which start training scripts."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from evener.balancer.number_format import duration, percent, write_share
from evener.errors import RequestError
from evener.launch.guard import GuardedTraining, start_guard
from evener.launch.job import HostJob, find_imports, make_job
from evener.launch.program import (
    choose_plan,
    compare_shares,
    list_events,
    measure_plan,
    read_command,
    read_notes,
    save_plan,
    set_environment,
)
from evener.launch.summary import (
    End,
    describe_summary,
    read_records,
    save_summary,
    summarize_training,
)
from evener.plan.file import Plan
from evener.plan.use import OPTION, describe_unused, is_used
from evener.printable import plain, print_notice
from evener.program.notes import ProgramSettings, RankNote
from evener.system.taken_cores import ProcessUse, name_competitors, read_process_use

from ..text.formatting import json_text
from ..text.parsing import parse_duration
from .options import DevicesOption, RayAddressOption

app = typer.Typer()
RECORDS_FOLDER = "records"  # in the launcher's folder: the last record of each process
SIGNALLED = 128  # a larger exit code means that a signal ended the program
RestartsOption = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        help="How often to restart all processes, on the devices left, if one is killed.",
    ),
]
SummaryOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print the results at the end as one JSON object on standard output."
    ),
]


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The file that --export wrote.")],
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT ARGS...", help="Or: -m MODULE ARGS...")
    ],
    max_restarts: RestartsOption = 0,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", help="Which host of the plan this is. Default: found by name and address."
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            help="HOST:PORT where hosts find each other. Default: the first host, 29400.",
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option("--wait", help="How long to wait for all hosts, like 10m. PyTorch only.")
    ] = "60s",
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            help="How long processes may run after SIGTERM, to save a checkpoint.",
        ),
    ] = "30s",
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Start it on all hosts of the plan, through their Ray cluster."),
    ] = False,
    ray_address: RayAddressOption = "",
    plan_check: Annotated[
        bool,
        typer.Option(
            " /--no-plan-check",
            help="Allow a script that never reads the plan because it divides the rows itself.",
        ),
    ] = True,
    as_json: SummaryOption = False,
) -> int:
    """Train with a plan: start the script once for each of its devices, as torchrun does; for Keras
    with TF_CONFIG.

    Split() and with_plan(Trainer) in the script find the plan by themselves.
    """
    wait_seconds = parse_duration(wait, "--wait")
    grace_seconds = parse_duration(grace, "--grace")
    if ray and host is not None:
        raise RequestError(
            "--host says which host this is, and --ray starts all of them.", "Give one of them."
        )
    if ray:
        from evener.launch.cluster import launch_on_cluster

        more = [] if plan_check else [OPTION]
        return launch_on_cluster(
            plan, script, max_restarts, rendezvous, ray_address, wait_seconds, grace_seconds, more
        )
    job = make_job(
        plan, script, host, rendezvous, wait_seconds, grace_seconds, check_use=plan_check
    )
    if rendezvous is None:
        _print_other_hosts(job, max_restarts)
    with start_guard("evener-launch-") as guard:
        before = read_process_use()
        code = _train(job, guard, _name(job), f"starts: {_list_shares(job)}", max_restarts)
        _print_summary(job, guard, before, code, as_json)
        return code


def _train(
    job: HostJob, guard: GuardedTraining, name: str, announcement: str, max_restarts: int
) -> int:
    """Run the processes of a job until all have ended, and return the exit code.

    First prints `name` and `announcement`, which says where the job starts. A script that exits
    with 0 but has never read the plan counts as an error.
    """
    from evener.launch.processes import named_output
    from evener.launch.restarts import run_job

    print_notice(f"{name} {announcement}")
    began = time.monotonic()
    records = guard.folder / RECORDS_FOLDER
    records.mkdir()
    job = msgspec.structs.replace(job, run=guard.run, folder=guard.folder, records=records)
    with named_output(job.names, lambda: job.has_several) as output:
        code = run_job(msgspec.structs.replace(job, output=output), max_restarts)
    if not code and job.use_file and not is_used(job.use_file):
        text = describe_unused(find_imports(job), program=job.framework == "torch")
        print(f"evener: {name}: {text}", file=sys.stderr, flush=True)
        code = RequestError.exit_code
    guard.succeeded = not code
    if not code:
        print_notice(f"{name} has ended, after {duration(time.monotonic() - began)}")
    return code


def _print_summary(
    job: HostJob,
    guard: GuardedTraining,
    use_before: ProcessUse,
    code: int,
    as_json: bool,
    rank_notes: Sequence[RankNote] = (),
) -> None:
    """Save and print a summary of the training run, unless its processes left no records.

    - `use_before`: the CPU use of all processes when the training run began.
    - `rank_notes`: what each rank of `evener run` noted about its hooks, step times and shares.
    """
    end: End = "failed" if code else "finished"
    if code > SIGNALLED:
        end = "interrupted"
    devices = chain.from_iterable(job.processes)
    labels = {share.device: device.label for share, device in zip(job.own, devices, strict=True)}
    records = read_records(guard.folder / RECORDS_FOLDER)
    planned = job.plan.throughput.samples_per_second
    processes = max((record.world for record in records), default=0)
    if job.executable and processes < len(job.plan.layout.active):
        planned = 0.0  # the program has trained on fewer devices than the plan is for
    competitors = name_competitors(use_before, read_process_use(), os.getpid(), 0.0)
    first = compare_shares(rank_notes)
    summary = summarize_training(records, guard.run, end, labels, planned, competitors, first)
    if summary is None:
        return
    save_summary(summary)
    if as_json:
        print(json_text(summary), flush=True)
    else:
        print_notice(*describe_summary(summary))


def _name(job: HostJob) -> str:
    """Return a short name of the job's script: its file name, or `-m MODULE`."""
    return " ".join(job.command[:2]) if job.command[0] == "-m" else Path(job.command[0]).name


def _list_shares(job: HostJob) -> str:
    """Describe the share of each device on this host, as in "640 rows on GPU:0"."""
    # For a device without rows, the text says how much of a sharded model's state the device holds.
    listed = []
    for share, device in zip(job.own, chain.from_iterable(job.processes), strict=True):
        if not share.batch:
            listed.append(f"{percent(share.state)} of the state and no rows on {device.label}")
            continue
        unit = "row" if share.batch == 1 else "rows"
        listed.append(f"{write_share(share.batch, share.micro)} {unit} on {device.label}")
    return ", ".join(listed)


def _print_other_hosts(job: HostJob, max_restarts: int) -> None:
    """Print the command that starts the training run on each other host of the plan."""
    options = ["--max-restarts", str(max_restarts)] if max_restarts else []
    if not job.use_file:
        options.append(OPTION)
    script, *words = job.command
    if script != "-m":
        script = str(Path(script).absolute())
    meeting = "{}:{}".format(*job.rendezvous)
    for other in job.hosts:
        if other != job.host:
            place = ["--host", other, "--rendezvous", meeting]
            line = shlex.join(["evener", "launch", *options, *place, str(job.path), script, *words])
            print_notice(f"on {plain(other)} run: {plain(line)}")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="As you would type it in a shell."),
    ] = None,
    devices: DevicesOption = "auto",
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="Keep the shares of this plan. Default: they follow the devices' speed."
        ),
    ] = None,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="Measure a plan first, by the program's build() or transformers.Trainer.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="End the program if it can't be balanced. Default: it trains with equal shares.",
        ),
    ] = False,
    noise: Annotated[
        bool,
        typer.Option(
            "--noise",
            help="Measure the gradient's noise scale: what a larger batch costs in learning.",
        ),
    ] = False,
    max_restarts: RestartsOption = 0,
    as_json: SummaryOption = False,
) -> int:
    """Start a training program once for each device, as torchrun does, and balance it without
    changing a line.

    Its global batch, the order of rows and what it learns stay the same; docs/run.md says which
    programs work.
    """
    words = command or []
    read = read_command(words)
    if balance and plan is not None:
        raise RequestError("--balance measures a plan, and --plan gives one.", "Give one of them.")
    with start_guard("evener-run-") as guard:
        if balance:
            plan = measure_plan(read, devices, guard.folder / "measured.toml", guard.run)
        chosen = choose_plan(plan, devices, read)
        if noise:
            _check_several(chosen.plan)
        notes = guard.folder / "notes"
        notes.mkdir()
        rebalance = not chosen.given
        set_environment(
            ProgramSettings(str(notes), read.name, strict, rebalance, noise, chosen.origin)
        )
        path = guard.folder / "plan.toml"
        chosen.plan.save(path)
        job = make_job(path, read.words, None, None, executable=read.executable)
        before = read_process_use()
        code = _train(job, guard, read.name, _format_start(job), max_restarts)
        left = read_notes(notes)
        print_notice(*list_events(left))
        _print_summary(job, guard, before, code, as_json, left)
        has_new_shares = len(job.processes) > 1 and (balance or not chosen.given)
        saved = None
        if has_new_shares and not code:
            saved = save_plan(chosen.plan, read, left)
    if saved is not None:
        again = shlex.join(["evener", "run", "--plan", str(saved), "--", *words])
        print_notice(f"these shares again: {again}")
    return code


def _format_start(job: HostJob) -> str:
    """Describe which devices the program starts on, such as "starts on GPU:0, GPU:1"."""
    labels = ", ".join(device.label for device in chain.from_iterable(job.processes))
    alone = "" if len(job.processes) > 1 else ", one device, so it has no shares to balance"
    return f"starts on {labels}{alone}"


def _check_several(plan: Plan) -> None:
    """Raise RequestError if the plan uses only one device."""
    # The noise scale is computed from differences between the gradients of several devices.
    if len(plan.layout.active) == 1:
        raise RequestError(
            "--noise compares a training's processes, and on one device there is only one.",
            "Leave --noise out, or give two devices.",
        )
