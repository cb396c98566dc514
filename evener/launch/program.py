"""Prepare `evener run`: parse the command, choose the first shares, and save the last ones."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from evener.devices.discover import discover
from evener.devices.registry import find_backend, import_path
from evener.devices.terms import write_limit
from evener.workloads.user_code import script_framework

from ..errors import DeviceError, EvenerError, RequestError
from ..plan.file import Plan, Share, load_plan, make_layout, parse_plan
from ..program.notes import ProgramSettings, RankNote, SharesOrigin
from ..system.files import runs_folder, write_atomically
from ..system.signals import end_with_parent
from ..training.launched import PROGRAM, PROGRAM_COMMAND, RUN
from ..training.step_record import compare
from .summary import FirstShares

PLAN_FILE = "plan.toml"  # in the folder of the program's training journal
SAVED_FILE = "saved_shares.json"  # in the same folder
# commands that start a script, which messages name instead
LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "composer", "fabric")
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)


class SavedShares(msgspec.Struct, frozen=True):
    """What saved shares are for: a command, a model and a global batch."""

    command: str  # a digest of the program, its arguments and its devices
    origin: SharesOrigin


class ChosenPlan(msgspec.Struct, frozen=True):
    """The plan that a program starts with, and where its shares come from."""

    plan: Plan
    given: bool = False  # given by the user, so its shares are kept
    origin: SharesOrigin | None = None  # set if the shares are those of an earlier training run


class ProgramCommand(msgspec.Struct, frozen=True):
    """A training command, split into its executable and arguments.

    `words` are all arguments of the executable, and `arguments` those of the script. `identity`
    names the script, module or executable.
    """

    executable: str
    words: tuple[str, ...]
    identity: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name to show in messages.

        If the program is a launcher such as torchrun, it is the name of the script that is
        launched, and otherwise that of the program itself.
        """
        started = _find_script(self.arguments) if self._is_launcher else ""
        return Path(started or self.identity).name

    @property
    def _is_launcher(self) -> bool:
        module = self.identity.removeprefix("-m ")
        return module in LAUNCHER_MODULES or Path(module).name in LAUNCHERS


def _find_script(arguments: Sequence[str]) -> str:
    """Return the script or `-m MODULE` among a launcher's arguments, or "" if there is none."""
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        if word.endswith(".py"):
            return word
        # the option is a flag: the module needn't come right after it
        if word in ("-m", "--module") and following and not following.startswith("-"):
            return f"-m {following}"
    return ""


def read_command(words: Sequence[str]) -> ProgramCommand:
    """Parse the command that follows `evener run --`.

    If it begins with a script or `-m`, it is run with this process's Python. Raises RequestError if
    the command doesn't exist, if it trains with TensorFlow, or if it has Python options that turn
    off evener's hooks.
    """
    if not words:
        raise RequestError("No command is given.", "Write evener run -- python train.py ARGS.")
    first, *rest = words
    if first == "-m" or first.endswith(".py"):
        first = sys.executable
        rest = [*words]
    executable = shutil.which(first)
    if executable is None:
        raise RequestError(
            f"There is no command {first}.", "Correct its name, or give the path of a script."
        )
    if Path(executable).name.startswith("python"):
        return _read_python(executable, rest)
    return ProgramCommand(executable, tuple(rest), str(Path(executable).absolute()), tuple(rest))


def _read_python(executable: str, rest: Sequence[str]) -> ProgramCommand:
    options = _skip_options(rest)
    _refuse_isolation(rest[: len(rest) - len(options)])
    script = options[0] if options else ""
    if script == "-m" and len(options) > 1:
        module = Path(*options[1].split("."))
        _refuse_tensorflow(module / "__main__.py" if module.is_dir() else module.with_suffix(".py"))
        return ProgramCommand(executable, tuple(rest), f"-m {options[1]}", tuple(options[2:]))
    if not script.endswith(".py"):
        return ProgramCommand(executable, tuple(rest), executable, tuple(rest))
    if not Path(script).is_file():
        raise RequestError(f"There is no script {script}.", "Correct its name.")
    _refuse_tensorflow(Path(script))
    return ProgramCommand(executable, tuple(rest), str(Path(script).absolute()), tuple(options[1:]))


def _refuse_tensorflow(script: Path) -> None:
    """Raise RequestError if a script trains with TensorFlow."""
    # its batches can't be divided here, so each process would train on all rows
    if script_framework(script) == "tensorflow":
        raise RequestError(
            f"{script} trains with TensorFlow, and evener run balances PyTorch.",
            (
                "Build its model by Split().build(build), and start it by evener launch with a "
                "plan (docs/training.md)."
            ),
        )


def _refuse_isolation(options: Sequence[str]) -> None:
    """Raise RequestError if an option makes Python ignore PYTHONPATH or sitecustomize."""
    # evener installs its hooks through these two
    flags = [
        word for word in options if word.startswith("-") and word[:2] not in ("--", "-W", "-X")
    ]
    found = sorted(set("".join(flags)) & set("IES"))
    if found:
        raise RequestError(
            f"python -{found[0]} ignores PYTHONPATH or sitecustomize, by which evener run works.",
            "Leave it out.",
        )


def _skip_options(words: Sequence[str]) -> list[str]:
    """Remove the options of Python itself from the arguments of a `python` command.

    The result begins with the script, `-m` or `-c`, or is [] if there is none of them.
    """
    left = list(words)
    while left and left[0].startswith("-") and left[0] not in ("-m", "-c", "-"):
        takes_value = left.pop(0) in ("-W", "-X", "--check-hash-based-pycs")
        del left[:takes_value]
    return left


def choose_plan(plan_path: Path | None, devices: str, command: ProgramCommand) -> ChosenPlan:
    """Return the plan that a program starts with.

    This is the plan at `plan_path` if a path is given. Otherwise, it is a plan with the shares that
    the last run of the same command on the same devices saved, or with equal shares. `devices` is
    the option `--devices`. Raises RequestError if the plan is for several hosts or if a device has
    a limit, and DeviceError if devices are simulated.
    """
    if plan_path is not None:
        plan = load_plan(plan_path)
        if len({share.host for share in plan.layout.active}) > 1:
            raise RequestError(
                "The plan is for several hosts.", "Make one for the devices of this machine."
            )
        return ChosenPlan(msgspec.structs.replace(plan, workload=command.identity), given=True)
    found = discover(devices).devices
    if any(find_backend(device.kind).simulated for device in found):
        raise DeviceError("A simulated device trains nothing.", "Name real devices.")
    limits = {device.label: write_limit(device.limit) for device in found}
    limited = [f"{label} @{limit}" for label, limit in limits.items() if limit]
    if limited:
        raise RequestError(
            f"A program isn't held to a limit: {', '.join(limited)}.",
            (
                "Omit the limit; evener balance measures under it, and evener run --plan takes "
                "the shares of its plan."
            ),
        )
    templates = tuple(Share(device.id, device.index, device.name, 0, 0.0) for device in found)
    even = make_plan(command.identity, templates, (1,) * len(found))
    return _find_last_plan(even, command) or ChosenPlan(even)


def measure_plan(command: ProgramCommand, devices: str, path: Path, run: str) -> Path | None:
    """Measure a program on the devices, and return the path of the resulting plan.

    `devices` is the option `--devices`, and `path` is where to write the plan. `run` is the name of
    the run, so that the process that cleans up after the launcher can find the measuring processes.
    Returns None if the plan leaves a device out. Raises RequestError if no plan could be measured.
    """
    # a plan must use all devices, because the program's global batch is meant for all of them
    python = (
        command.executable if Path(command.executable).name.startswith("python") else sys.executable
    )
    words = (
        _skip_options(command.words)
        if python == command.executable
        else [command.executable, *command.words]
    )
    entry = (
        f"{words[0]}:build"
        if words and _has_build(Path(words[0]))
        else "evener.program.trainers:build"
    )
    environment = {
        **os.environ,
        PROGRAM_COMMAND: json.dumps(words),
        RUN: run,
        "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", "")),
    }
    options = (
        "--framework",
        "torch",
        "--workload",
        entry,
        "--devices",
        devices,
        "--export",
        str(path),
    )
    code = subprocess.run(
        [python, "-m", "evener", "compare", "--layouts", "split", *options],
        env=environment,
        check=False,
        preexec_fn=end_with_parent,
    ).returncode
    if code or not path.exists():
        raise RequestError(
            f"No plan was measured for {command.name}.",
            "Correct what is said above, or omit --balance.",
        )
    if len(load_plan(path).layout.active) == len(discover(devices).devices):
        return path
    print(
        "evener: this plan leaves a device out, and the program is asked for all: it isn't used",
        file=sys.stderr,
    )
    return None


def _has_build(path: Path) -> bool:
    """Return True if a file is a Python script that defines a function `build`."""
    with suppress(OSError, ValueError, SyntaxError):
        body = ast.parse(path.read_text()).body
        return path.suffix == ".py" and any(
            isinstance(each, ast.FunctionDef) and each.name == "build" for each in body
        )
    return False


def make_plan(identity: str, templates: Sequence[Share], batches: Sequence[int]) -> Plan:
    """Return a PyTorch plan in which each device has the given number of rows.

    `identity` names the program, and `templates` are shares that describe the devices.
    """
    layout = make_layout("split" if len(batches) > 1 else "solo", tuple(templates), tuple(batches))
    made = parse_plan(b'[[layout.share]]\ndevice = "cpu-0-of-1"\nbatch = 1\n')
    return msgspec.structs.replace(made, workload=identity, framework="torch", layout=layout)


def _find_last_plan(even_plan: Plan, command: ProgramCommand) -> ChosenPlan | None:
    """Return the plan that the latest run of the same command saved, or None if there is none.

    `even_plan` is the plan with equal shares. Only runs on the same devices count.
    """
    wanted = _digest_command(command, even_plan)
    for path in sorted(runs_folder().glob(f"*/{SAVED_FILE}"), reverse=True):
        with suppress(EvenerError, OSError, msgspec.DecodeError):
            saved = msgspec.json.decode(path.read_bytes(), type=SavedShares)
            if saved.command == wanted:
                return ChosenPlan(load_plan(path.with_name(PLAN_FILE)), origin=saved.origin)
    return None


def _digest_command(command: ProgramCommand, plan: Plan) -> str:
    """Return a digest of a program, its arguments and its devices, as 32 hexadecimal digits."""
    # a digest, because arguments may contain secrets
    devices = sorted(share.device for share in plan.layout.active)
    words = json.dumps([command.identity, command.arguments, devices])
    return blake2b(words.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def set_environment(settings: ProgramSettings) -> None:
    """Set the environment variables that make a program's processes train with evener."""
    os.environ[PROGRAM] = msgspec.json.encode(settings).decode()
    os.environ["PYTHONUNBUFFERED"] = "1"


def read_notes(folder: Path) -> tuple[RankNote, ...]:
    """Read what each rank of a program has reported, ordered by rank.

    Files that can't be decoded are skipped.
    """
    notes = []
    for path in folder.glob("*.json"):
        with suppress(msgspec.DecodeError):
            notes.append(msgspec.json.decode(path.read_bytes(), type=RankNote))
    return tuple(sorted(notes, key=lambda note: note.rank))


def save_plan(plan: Plan, command: ProgramCommand, notes: Sequence[RankNote]) -> Path | None:
    """Save a program's last shares for the next run of the same command.

    `plan` is the plan that the program started with. Returns the path of the saved plan, or None if
    the last shares aren't known or two ranks shared a device.
    """
    if not notes or not notes[0].run or notes[0].last is None:
        return None
    last = notes[0].last.shares
    if len(notes) < len(last):
        return None
    shares = {note.device: last[note.rank] for note in notes}
    planned = {each.device for each in plan.layout.active}
    if len(shares) < len(notes) or not shares.keys() <= planned:
        return None  # several of the program's own processes shared a device
    active = [share for share in plan.layout.active if share.device in shares]
    made = make_plan(command.identity, active, [shares[share.device] for share in active])
    path = runs_folder() / notes[0].run / PLAN_FILE
    made.save(path)
    origin = SharesOrigin(notes[0].model, sum(last))
    saved = SavedShares(_digest_command(command, made), origin)
    write_atomically(path.with_name(SAVED_FILE), msgspec.json.encode(saved))
    return path


def compare_shares(notes: Sequence[RankNote]) -> FirstShares | None:
    """Compare the program's speed with its first and its last shares.

    Returns None if the times of a rank are unknown.
    """
    first = [note.first for note in notes if note.first is not None]
    last = [note.last for note in notes if note.last is not None]
    if not first or len(first) < len(notes) or len(last) < len(notes):
        return None
    shares, step_s = first[0].shares, first[0].step_s
    return FirstShares(
        shares=shares,
        own_work_s=tuple(each.own_work_s for each in first),
        last_own_work_s=tuple(each.own_work_s for each in last),
        samples_per_second=sum(shares) / step_s if step_s else 0.0,
        changes=notes[0].changes,
        compared=compare(first, last),
    )


def list_events(notes: Sequence[RankNote]) -> list[str]:
    """Return lines of text about retries after running out of memory and about the noise scale."""
    retreats = sum(note.retreats for note in notes)
    lines = [notes[0].noise] if notes and notes[0].noise else []
    if retreats:
        text = "passes that ran out of memory and were computed again in smaller ones"
        lines.insert(0, f"{text}: {retreats}")
    return lines
