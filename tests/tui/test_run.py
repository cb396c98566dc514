"""`evener run`: unchanged programs, their commands, and what they learn with other shares."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.errors import RequestError
from evener.launch.processes import named_output
from evener.launch.program import (
    ChosenPlan,
    ProgramCommand,
    choose_plan,
    measure_plan,
    read_command,
    read_notes,
    save_plan,
)
from evener.plan.file import load_plan
from evener.program.notes import RankNote, SharesOrigin, print_on_first_rank
from evener.system.files import runs_folder
from evener.training.step_record import ShareTimes
from tests.support.cores import two_cores
from tests.support.forked_evener import ForkedEvener
from tests.support.frameworks import LazyModule, skip_without
from tests.support.launched_plan import UNEVEN
from tests.support.rank_server import RankServer

torch = LazyModule("torch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM, TRAINER, ACCELERATED, LIGHTNING, BUCKETED = (
    str(ROOT / f"tests/support/{name}_program.py")
    for name in ("ddp", "trainer", "accelerated", "lightning", "bucketed")
)
OWN_MEANS = str(ROOT / "tests/support/trainer_own_means.py")


Ranks = Callable[..., list[Any]]
SCRIPTS = "tests.support.script_ranks"


def make_variables(folder: Path) -> dict[str, str]:
    """Return the variables of `evener run` in a folder: this Python, this evener, one thread per
    process.
    """
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "XDG_STATE_HOME": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of a weight."""
    pairs = ((torch.tensor(one[name]), torch.tensor(other[name])) for name in one)
    return max(float((mine - its).abs().max()) for mine, its in pairs)


@two_cores
@pytest.mark.slow
def test_an_unchanged_program_learns_the_same_by_other_shares(
    tmp_path: Path, trainer_ranks: Ranks, rank_server: Callable[[str], RankServer]
) -> None:
    evenly = trainer_ranks(f"{SCRIPTS}.run_saving_script", PROGRAM, world=2)
    (tmp_path / "plan.toml").write_text(UNEVEN)
    words = "run", "--plan", "plan.toml", "--", "python", PROGRAM, f"{tmp_path}/"
    server = rank_server("tests.support.torch_imports")
    ended = ForkedEvener(server, tmp_path, tmp_path / "evener", words, make_variables(tmp_path))
    _, errors = ended.communicate(240)
    assert not ended.returncode, errors
    first, second = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert first["rows"] == [4, *[6] * 5, 3, *[6] * 6, 3]  # the program's own first step
    assert second["rows"] == [4, *[2] * 5, 1, *[2] * 6, 1]
    assert first["weights"] == second["weights"]
    assert difference(first["weights"], evenly[0]["weights"]) <= 1e-12
    assert first["evaluated"] == evenly[0]["evaluated"]
    assert "6+2 = 8 rows a step, with DistributedDataParallel and DataLoader" in errors


@pytest.mark.slow
@two_cores
def test_a_compiled_step_has_the_graphs_of_the_program_alone(tmp_path: Path) -> None:
    """evener's hooks are called between them, and aren't compiled."""
    skip_without("torch")
    variables = {**os.environ, **make_variables(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = str(ROOT)  # the compiler is imported as in users' processes
    program = [sys.executable, "-W", "ignore", str(ROOT / "tests/support/compiled_program.py")]
    found = []
    for words in ([], [sys.executable, "-m", "evener", "run", "--"]):
        ended = subprocess.run(
            [*words, *program], env=variables, cwd=tmp_path, capture_output=True, text=True
        )
        assert not ended.returncode, ended.stderr
        found.append(json.loads(ended.stdout.splitlines()[-1]))
    alone, timed = found
    assert all(each["graphs"] for each in alone)
    assert timed == alone
    assert " steps in " in ended.stderr, "they were timed"


@pytest.mark.slow
@two_cores
def test_shares_of_another_model_are_not_taken_again(tmp_path: Path, trainer_ranks: Ranks) -> None:
    """A configuration file may have made the model larger, so the shares may not fit in memory."""
    plan, notes = tmp_path / "plan.toml", tmp_path / "notes"
    plan.write_text(UNEVEN)
    notes.mkdir()
    train = functools.partial(
        trainer_ranks, f"{SCRIPTS}.run_by_last_shares", str(plan), str(notes), PROGRAM, world=2
    )
    said = train("another model", 8)[0]["said"]
    assert "4+4 = 8 rows a step, with DistributedDataParallel" in said
    assert said.count("the last training's shares were of another model or batch") == 1
    (model,) = {note.model for note in read_notes(notes)}
    assert "6+2 = 8 rows a step" in train(model, 8)[0]["said"]
    assert "4+4 = 8 rows a step" in train(model, 4)[0]["said"]


@pytest.fixture
def train(trainer_ranks: Ranks, tmp_path: Path) -> Ranks:
    """Return a function `train(script, imports, *words)` that returns what each rank saved.

    The ranks train evenly, and then by shares with the hooks of evener run. They are forked from a
    process that has imported the library `imports`. The test above starts evener run itself, which
    does the same for every program.
    """
    plan = tmp_path / "plan.toml"
    plan.write_text(UNEVEN)

    def run(script: str, imports: str, *words: str) -> list[Any]:
        skip_without(imports.partition(".")[0])
        ranks = functools.partial(trainer_ranks, world=2, imports=imports)
        evenly = [] if words else ranks(f"{SCRIPTS}.run_saving_script", script)
        return [evenly, ranks(f"{SCRIPTS}.run_by_shares", str(plan), script, *words)]

    return run


@pytest.mark.slow
def test_a_trainer_learns_the_same_by_other_shares(train: Ranks) -> None:
    evenly, (first, second) = train(TRAINER, "transformers.trainer")
    assert first["weights"] == second["weights"]
    assert difference(first["weights"], evenly[0]["weights"]) <= 1e-12
    assert "3+1 = 4 rows a step, with Trainer, a transformers.Trainer" in first["said"]
    assert first["said"].count("it is a sum, not a mean over rows") == 1  # the second training
    assert first["last trainer"] == "SumTrainer"


@pytest.mark.slow
def test_a_trainer_with_batches_of_its_own_learns_the_same_by_other_shares(train: Ranks) -> None:
    """The batches of all ranks in a step are one global batch, however they are made."""
    evenly, by_shares = train(BUCKETED, "transformers.trainer")
    said = by_shares[0]["said"]
    assert "6+2 = 8 rows a step, with DistributedDataParallel and DataLoader" in said
    for now, own, share in zip(by_shares, evenly, (6, 2), strict=True):
        assert own["rows"] == [4] * 18
        assert [rows for rows in now["rows"] if rows == share]
        assert difference(now["weights"], own["weights"]) <= 1e-12


@pytest.mark.slow
def test_a_loss_that_transformers_multiplies_by_the_processes_stays_so(train: Ranks) -> None:
    """The original launcher learns and logs the same. A mean over a rank's own labels can't be
    uneven.
    """
    (evenly, _), (found, _) = train(OWN_MEANS, "transformers.trainer")
    for name in ("classes", "masked", "masked unevenly"):
        assert difference(found[name]["weights"], evenly[name]["weights"]) <= 1e-12
        assert found[name]["logged"] == pytest.approx(evenly[name]["logged"], rel=1e-6)
    assert found["said"].count("3+1 = 4 rows a step, with Trainer") == 2
    assert "its loss is 2 times the mean, as with its own launcher" in found["said"]
    assert found["said"].count("a mean over a rank's own labels") == 1


@pytest.mark.slow
def test_a_lightning_trainer_learns_and_logs_the_same_by_other_shares(train: Ranks) -> None:
    evenly, by_shares = train(LIGHTNING, "lightning")
    assert "6+2 = 8 rows a step, with lightning.Trainer" in by_shares[0]["said"]
    # the second training
    assert by_shares[0]["said"].count("it is a sum, not a mean over rows") == 1
    for now, own, epoch in zip(by_shares, evenly, ([6] * 5 + [5], [2] * 5 + [1]), strict=True):
        assert now["rows"][:4] == [4] * 4  # even, until the first audit has been compared
        assert now["rows"][-6:] == epoch
        assert difference(now["weights"], own["weights"]) <= 1e-12
        assert difference(now["after"], own["after"]) <= 1e-12
        assert now["logged"] == pytest.approx(own["logged"], abs=1e-12)
        assert now["strategy"] == "DDPStrategy"


@pytest.mark.slow
def test_a_loop_of_accelerate_learns_the_same_by_other_shares(train: Ranks) -> None:
    for now, own, share in zip(*reversed(train(ACCELERATED, "accelerate")), (6, 2), strict=True):
        # two steps of two batches are looked at, as it gathers figures, and one batch is fetched
        assert now["rows"][:6] == [4, 4, 4, 4, 4, share]
        assert difference(now["weights"], own["weights"]) <= 1e-12
        assert {name: now[name] for name in ("gathered", "correct", "rate")} == {
            name: own[name] for name in ("gathered", "correct", "rate")
        }
    _, (first, _) = train(ACCELERATED, "accelerate", "--dispatch")
    assert first["said"].count("shares stay equal: one rank reads the rows of all") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "No command is given"),
        (["nowhere-to-be-found"], "There is no command nowhere-to-be-found"),
        (["python", "nowhere.py"], "There is no script nowhere.py"),
    ],
)
def test_a_command_that_cannot_be_balanced_is_a_one_line_error(
    words: list[str], named: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_command(words)
    assert named in str(refused.value)


def test_a_command_is_named_by_what_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["-u", "-W", "ignore", "-Xdev", "-X", "utf8"]
    for words in (
        ["python", str(script), "-x"],
        [str(script), "-x"],
        ["python", *options, str(script), "-m", "x"],
    ):
        assert read_command(words).identity == str(script)
    assert read_command(["-m", "json.tool", "-h"]).identity == "-m json.tool"
    assert read_command(["true"]).name == "true"


@pytest.mark.parametrize(
    ("identity", "arguments", "name"),
    [
        ("/bin/torchrun", "--nproc-per-node 2 /src/train.py --epochs 3", "train.py"),
        ("/bin/torchrun", "--nproc-per-node 2 -m package.train x.py", "-m package.train"),
        ("-m torch.distributed.run", "--standalone train.py", "train.py"),
        ("/bin/accelerate", "launch --num_processes 2 train.py", "train.py"),
        ("/bin/torchrun", "-m --nproc-per-node=2 package.train", "torchrun"),
        ("/bin/torchrun", "--help", "torchrun"),
        ("/bin/llamafactory-cli", "train config.py", "llamafactory-cli"),
        ("/src/main.py", "other.py", "main.py"),
    ],
)
def test_messages_name_the_script_that_a_launcher_starts(
    identity: str, arguments: str, name: str
) -> None:
    words = tuple(arguments.split())
    assert ProgramCommand("python", words, identity, words).name == name


@pytest.mark.slow
def test_the_trainer_of_a_program_is_what_it_would_train(trainer_ranks: Ranks) -> None:
    """The option --balance measures it: the program makes it, and ends where it would train."""
    skip_without("transformers")
    found = trainer_ranks(
        f"{SCRIPTS}.save_captured_trainer", TRAINER, imports="transformers.trainer"
    )
    assert found == [["Trainer", 0]]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_training_in_each_process_alone_is_reported_and_refused_by_strict(
    strict: bool, trainer_ranks: Ranks
) -> None:
    ((raised, noted),) = trainer_ranks(f"{SCRIPTS}.save_step_alone", strict)
    assert "trains without a process group" in noted
    assert ("Leave --strict out" in raised) is strict


def test_a_script_for_tensorflow_alone_is_refused(tmp_path: Path) -> None:
    """Each process would train all of it, without a message."""
    script = tmp_path / "train.py"
    script.write_text("import keras")
    for words in ([str(script)], ["python", "-u", str(script), "--epochs", "3"]):
        with pytest.raises(RequestError, match=r"trains with TensorFlow.* evener launch"):
            read_command(words)
    script.write_text("import keras, torch")
    assert read_command([str(script)]).name == "train.py"


def test_a_python_that_ignores_the_hooks_is_refused(tmp_path: Path) -> None:
    """Its ranks would train evenly, and rendezvous at a port that is open to all."""
    script = tmp_path / "train.py"
    script.write_text("import torch")
    for options in (["-I"], ["-u", "-sE"], ["-W", "ignore::ImportWarning", "-S"]):
        with pytest.raises(RequestError, match="ignores PYTHONPATH or sitecustomize"):
            read_command(["python", *options, str(script)])
    for options in (["-W", "ignore::ImportWarning"], ["-Xutf8"], ["-u", "-s", "-O"]):
        assert read_command(["python", *options, str(script), "-I"]).name == "train.py"


def test_a_module_for_tensorflow_alone_is_refused_as_a_script_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("train", "__main__"):
        (tmp_path / f"package/{name}.py").write_text("import keras")
    for module in ("package", "package.train"):
        with pytest.raises(RequestError, match=r"\.py trains with TensorFlow.* evener launch"):
            read_command(["python", "-m", module])
    (tmp_path / "package/train.py").write_text("import torch")
    for module in ("package.train", "installed.elsewhere"):
        assert read_command(["-m", module]).name == f"-m {module}"


@two_cores
def test_a_plan_is_measured_by_build_else_by_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    plan, script = UNEVEN, tmp_path / "train.py"

    def start(words: list[str], **_: Any) -> Any:
        started.append(words)
        Path(words[words.index("--export") + 1]).write_text(plan)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", start)
    for text, entry in (
        ("def build(): ...", f"{script}:build"),
        ("", "evener.program.trainers:build"),
    ):
        script.write_text(text)
        measured = measure_plan(
            read_command([str(script), "-x"]), "cpu/2", tmp_path / "plan.toml", ""
        )
        assert measured is not None
        assert load_plan(measured).layout.batches == (3, 1)
        assert entry in started[-1]
    plan = UNEVEN.partition('[[layout.share]]\ndevice = "cpu-1')[0]
    assert measure_plan(read_command([str(script)]), "cpu/2", tmp_path / "plan.toml", "") is None


@two_cores
def test_the_last_shares_are_taken_again() -> None:
    small = ProgramCommand("python", (), "/train.py", ("--model", "small"))
    large = ProgramCommand("python", (), "/train.py", ("--model", "large"))
    other = ProgramCommand("python", (), "/other.py", ("--model", "small"))
    free = choose_plan(None, "cpu/2", small)
    (runs_folder() / "20261124-000000-0000").mkdir(parents=True)
    devices = [share.device for share in free.plan.layout.share]
    figures = ShareTimes((6, 2), 0.1, 0.2)
    notes = [
        RankNote(rank, device, "20261124-000000-0000", last=figures, model="m")
        for rank, device in enumerate(devices)
    ]
    assert save_plan(free.plan, small, notes) is not None
    again = choose_plan(None, "cpu/2", small)
    assert again.plan.layout.batches == (6, 2)
    assert again.origin == SharesOrigin("m", 8)
    for unlike in (large, other):
        assert choose_plan(None, "cpu/2", unlike) == ChosenPlan(
            msgspec.structs.replace(free.plan, workload=unlike.identity)
        )
    assert choose_plan(None, "cpu:0", small).plan.layout.batches == (1,)


@two_cores
def test_a_limit_that_would_not_hold_is_refused() -> None:
    """The training would be as fast as without it, and its shares would contradict the request."""
    with pytest.raises(RequestError, match="isn't held to a limit: CPU:1 @60%"):
        choose_plan(None, "cpu:0,cpu:1@60%", ProgramCommand("python", (), "train.py"))


def test_a_line_does_not_stick_to_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A progress bar leaves its line open. evener's line ends it, without an empty line."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with named_output(["rank 0"]) as ((_, errors),), open(errors, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        print_on_first_rank("a line of its own")
        stderr.write("\rSteps: 17%|#")
        print_on_first_rank("another")
        stderr.write("\rSteps: 18%|#\nthe end\n")
    printed = capfd.readouterr().err
    assert "[rank 0] evener: a line of its own\n" in printed
    assert "Steps: 17%|#\r\n[rank 0] evener: another\n" in printed
    assert "[rank 0] \r\n" not in printed
