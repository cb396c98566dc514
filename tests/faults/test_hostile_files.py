"""Files that others made, may write, or placed in the way are not trusted or written through."""

from __future__ import annotations

import ast
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import evener
from evener.balancer import journal
from evener.balancer.request import Request
from evener.balancer.run import open_run
from evener.balancer.session import Session
from evener.balancer.store import runs
from evener.errors import EvenerError, RequestError
from evener.live.files import file_name, prepare_folder, replace_file, start_ticks
from evener.live.reporter import Reporter, read_trainings
from evener.plan.file import load_plan
from evener.system.files import state_folder
from evener.tui.cli.main import run
from tests.support.sources import PACKAGES, files, nodes, parsed

HOME = Path(evener.__file__).parents[1]
SOMEBODY = 12345
root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make files of somebody else"
)
SIMULATED = Request(devices="sim:gtx1080ti,gtx1080", max_global_batch=128)
LIVE = {
    "framework": "torch",
    "workload": "w",
    "samples_per_second": 5.0,
    "step": 1,
    "updated_at": 1.0,
    "devices": [],
}


def a_run() -> tuple[str, Path]:
    """Return a finished run and its journal."""
    session = Session(open_run(SIMULATED))
    list(session.events())
    session.close()
    return session.run_id, runs.journal_path(session.run_id)


def somebodys(path: Path) -> None:
    """Change the owner to another user."""
    os.chown(path, SOMEBODY, SOMEBODY)


def group_writable(path: Path) -> None:
    """Make it writable for its group."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)


def world_writable(path: Path) -> None:
    """Make it writable for everybody."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o002)


DISTRUSTED = [pytest.param(somebodys, marks=root_only), group_writable, world_writable]


@pytest.mark.parametrize("spoil", DISTRUSTED)
def test_a_journal_of_somebody_else_is_not_believed(
    spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's journal isn't shown, resumed or exported.

    The list gives the reason and still has the other runs.
    """
    name, path = a_run()
    other, _ = a_run()
    spoil(path)
    for arguments in (["runs", "show", name], ["export", name], ["balance", "--resume", name]):
        assert run(arguments) == 2
        assert "not trusted" in capsys.readouterr().err
    assert run(["runs"]) == 0
    printed = capsys.readouterr().out
    assert "not trusted" in printed
    assert other in printed


@pytest.mark.parametrize("spoil", DISTRUSTED)
def test_a_state_folder_of_somebody_else_is_not_used(spoil: Callable[[Path], None]) -> None:
    """Another user's state folder is used neither for runs nor for locks."""
    spoil(state_folder())
    with pytest.raises(RequestError, match="not trusted"):
        Session(open_run(SIMULATED))


@pytest.mark.parametrize("spoil", DISTRUSTED)
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_live_file_of_somebody_else_is_passed_over(
    spoil: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    """Another user's live file or folder is skipped."""
    folder = tmp_path / "live"
    prepare_folder(folder)
    path = folder / file_name(os.getpid(), start_ticks(os.getpid()) or 0, 1)
    replace_file(path, json.dumps(LIVE).encode())
    assert len(read_trainings([folder])) == 1
    spoil(path if what == "file" else folder)
    assert read_trainings([folder]) == ()
    assert path.exists(), "what is not ours is left alone"


@root_only
def test_a_lock_of_somebody_else_can_t_name_its_holder_at_will(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A lock's note is shown only if it is a number and a run's name."""
    session = Session(open_run(Request(devices="cpu", workload="synthetic")))
    for path in (state_folder() / "locks").iterdir():
        path.write_text(
            json.dumps({"pid": "\x1b[2J1", "run": "\x1b]0;gotcha\x07", "more": "x" * 5000})
        )
    assert run(["balance", "--devices", "cpu", "--workload", "synthetic"]) == 3
    session.close()
    text = capsys.readouterr().err
    assert "is being measured by another evener." in text
    assert "\x1b" not in text


def test_what_is_made_is_for_its_user_alone(own_state: Path) -> None:
    """Folders, journals, locks and live files are private with any umask."""
    before = os.umask(0)
    try:
        a_run()
        reporter = Reporter()
        os.environ["EVENER_LIVE_DIR"] = str(own_state / "evener" / "live")
        for _ in range(2):
            reporter._next_write = 0.0
            reporter.report(1)
        made = [own_state / "evener", *(own_state / "evener").rglob("*")]
        assert any(path.suffix == ".jsonl" for path in made)
        assert any("live" in path.parts and path.suffix == ".json" for path in made)
        assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
        reporter.close()
    finally:
        os.umask(before)
        os.environ.pop("EVENER_LIVE_DIR", None)


@pytest.mark.parametrize("place", ["runs", "locks", "journal", "live", "live file"])
def test_a_link_in_the_way_is_not_followed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symlink in place of evener's file can't make it write, truncate or delete another file."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept.json").write_text("precious")
    live = tmp_path / "live"
    monkeypatch.setenv("EVENER_LIVE_DIR", str(live))
    if place == "journal":
        name, path = a_run()
        path.unlink()
        path.symlink_to(victim / "kept.json")
        with pytest.raises(RequestError):
            runs.load_run(name)
        with pytest.raises(RequestError):
            journal.reopen(path)
        runs.delete_run(name)
    elif place.startswith("live"):
        if place == "live":
            live.symlink_to(victim, target_is_directory=True)
        else:
            prepare_folder(live)
            for serial in range(4):
                stem = file_name(
                    os.getpid(), start_ticks(os.getpid()) or 0, Reporter()._serial + serial
                )
                (live / stem).with_suffix(".tmp").symlink_to(victim / "kept.json")
        reporter = Reporter()
        for _ in range(2):
            reporter._next_write = 0.0
            reporter.report(1)
        reporter.close()
        assert read_trainings([live]) == ()
    else:
        world_writable(victim)
        (state_folder() / place).symlink_to(victim, target_is_directory=True)
        with pytest.raises(EvenerError, match="not trusted"):
            Session(open_run(Request(devices="cpu", workload="synthetic")))
    assert (victim / "kept.json").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["kept.json"]


def test_an_export_through_a_link_replaces_what_it_leads_to_and_makes_nothing_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exporting through a symlink works like the shell's `>`.

    The temporary name can't be guessed, and an existing file of that name isn't followed.
    """
    name, _ = a_run()
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "plan.toml").symlink_to(real / "target.toml")
    assert run(["export", name, "-o", str(tmp_path / "plan.toml")]) == 0
    assert (tmp_path / "plan.toml").is_symlink()
    assert load_plan(real / "target.toml").layout.global_batch
    assert [path.name for path in real.iterdir()] == ["target.toml"]


@pytest.mark.parametrize("kind", ["/dev/zero", "fifo", "folder", "large"])
@pytest.mark.parametrize("what", ["machine", "plan", "journal"])
def test_what_is_no_file_of_its_kind_ends_soon_and_in_bounded_memory(
    kind: str, what: str, tmp_path: Path
) -> None:
    """An endless device, a folder and a sparse file of a terabyte are refused.

    A pipe is read only where it can be meant.
    """
    path = tmp_path / "input.toml"
    if kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "fifo":
        if what in ("plan", "machine"):
            return  # `<(...)` of a shell is a valid way to pass these
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
        path.chmod(0o600)
    faults: list[BaseException] = []

    def read() -> None:
        try:
            if what == "plan":
                load_plan(path)
            elif what == "journal":
                journal.read(path)
            else:
                run_quietly("devices", "--devices", f"sim:{path}")
        except EvenerError as fault:
            faults.append(fault)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert faults


def run_quietly(*arguments: str) -> None:
    """Run a command and raise its error instead of exiting."""
    from evener.tui.cli.main import app

    app(args=list(arguments), standalone_mode=False)


BANNED_NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "jsonpickle",
}
BANNED_CALLS = {
    ("os", "system"),
    ("os", "popen"),
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
}


# functions that unpickle what other ranks, or anybody who reaches a port, have sent
BANNED_METHODS = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_object", "all_gather_objects"),
    *("rpc_sync", "rpc_async"),
}


def test_nothing_is_unpickled_or_evaluated() -> None:
    """No module imports, calls or evaluates anything that can run what it reads.

    The syntax trees contain no eval, no shell, and no collective of PyTorch that unpickles. Only
    importlib's loader runs the user's workload, in one place.
    """
    paths = [path for package in PACKAGES for path in files(package)]
    assert len(paths) > 200
    found = ((path, node) for path in paths for node in nodes(parsed(path)) if _runs(node, path))
    assert [f"{path}: {ast.unparse(node)}" for path, node in found] == []


def test_what_is_unpickled_or_evaluated_would_be_found() -> None:
    """The check finds one line of each kind; loading weights only is allowed."""
    found = (
        "import pickle",
        "from shelve import open",
        "eval(text)",
        "torch.load(path)",
        "loader.exec_module(one)",
        "run(words, shell=True)",
        "dist.all_gather_object(every, own)",
        "broadcast_object_list(every, 0)",
        "torch.load(path, weights_only=False)",
    )
    assert [
        sum(_runs(node, HOME / "evener/example.py") for node in nodes(ast.parse(line)))
        for line in found
    ] == [1] * 9
    for line in ("torch.load(path, weights_only=True)", "run(words, shell=False)", "import json"):
        assert not any(_runs(node, HOME / "evener/example.py") for node in nodes(ast.parse(line)))


def _runs(node: ast.AST, path: Path) -> bool:
    """True if this line of a file runs what it reads."""
    match node:
        case ast.Import(names=names):
            return bool({alias.name.partition(".")[0] for alias in names} & BANNED_MODULES)
        case ast.ImportFrom(module=module):
            return (module or "").partition(".")[0] in BANNED_MODULES
        case ast.Call(func=called, keywords=words):
            return (
                any(word.arg == "shell" and _true(word.value) for word in words)
                or (isinstance(called, ast.Name) and called.id in BANNED_NAMES | BANNED_METHODS)
                or (isinstance(called, ast.Attribute) and _is_banned(node, called, path))
            )
    return False


def _is_banned(call: ast.Call, called: ast.Attribute, path: Path) -> bool:
    if called.attr == "exec_module":
        return path.relative_to(HOME) != Path("workloads/user_code.py")
    if called.attr in BANNED_METHODS:
        return True
    banned = isinstance(called.value, ast.Name) and (called.value.id, called.attr) in BANNED_CALLS
    return banned and not _only_weights(call)


def _only_weights(call: ast.Call) -> bool:
    """True for `torch.load(..., weights_only=True)`, which makes only tensors and plain values."""
    return any(
        w.arg == "weights_only" and isinstance(w.value, ast.Constant) and w.value.value is True
        for w in call.keywords
    )


def _true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and node.value is False)


def test_foreign_code_runs_in_children_alone_and_the_help_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `file.py:attr`, this process only parses the file; a probe's child runs its code."""
    from evener.balancer.jobs import make_job

    source = tmp_path / "train.py"
    source.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef build():\n    return None\n")
    # TensorFlow need not be installed
    monkeypatch.setattr("evener.balancer.jobs.find_spec", lambda _: True)
    make_job(Request(devices="cpu", workload=f"{source}:build", framework="tensorflow"))
    assert not (tmp_path / "ran").exists()
    assert run(["balance", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "its code is run" in words


def test_a_plan_s_numbers_are_bounded(tmp_path: Path) -> None:
    """An absurd batch or count gives an error that names it instead of an allocation."""
    name, _ = a_run()
    path = tmp_path / "plan.json"
    assert run(["export", name, "--format", "json", "-o", str(path)]) == 0
    data = json.loads(path.read_bytes())
    data["layout"]["global_batch"] = 1 << 80
    path.write_bytes(json.dumps(data).encode())
    with pytest.raises(RequestError, match="global_batch"):
        load_plan(path)


def test_a_crash_log_is_written_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a crash log in a public folder may have been guessed."""
    from evener.tui import base_app

    (tmp_path / "kept").write_text("precious")
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such/folder")
    (tmp_path / f"crash-now-{os.getpid()}.log").symlink_to(tmp_path / "kept")
    assert base_app.write_crash_log(ValueError("x")) is None
    assert (tmp_path / "kept").read_text() == "precious"
    (tmp_path / f"crash-now-{os.getpid()}.log").unlink()
    written = base_app.write_crash_log(ValueError("x"))
    assert written is not None
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
