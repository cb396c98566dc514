"""Where a silent child is, read from the stack that it writes among all its other output."""

from __future__ import annotations

from pathlib import Path

import pytest

import evener
from evener.balancer.probes.protocol import read_stack

HOME = Path(evener.__file__).parent
WORKER = [(f"{HOME}/balancer/probes/worker.py", 107, "_build_workload")]
WORKER += [(f"{HOME}/balancer/probes/worker.py", 46, "main")]
USER_CODE = f"{HOME}/workloads/user_code.py"
LOAD = [(USER_CODE, 92, "call"), *WORKER]
LOADED = [(USER_CODE, 130, "_import"), (USER_CODE, 110, "find_function"), *WORKER]
MODEL = [("/home/me/train.py", 4, "load_model"), (USER_CODE, 121, "find_function"), *WORKER]
IMPORT = [
    ("<frozen importlib._bootstrap_external>", 940, "exec_module"),
    ("<frozen importlib._bootstrap>", 1176, "_find_and_load"),
]
MODULE, BUILD = [("/home/me/train.py", 2, "<module>")], [("/home/me/train.py", 6, "build")]
LAYER = [("/home/me/layers.py", 9, "spin")]


def dump(frames: list[tuple[str, int, str]], thread: str = "Current thread") -> str:
    """Return a stack as faulthandler writes it, the innermost frame first."""
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join([f"{thread} 0x00007f3a2c1ff6c0 (most recent call first):", *lines, ""])


@pytest.mark.parametrize(
    ("frames", "step", "where"),
    [
        (LAYER + BUILD + LOAD, "building", "/home/me/layers.py:9"),
        (IMPORT + BUILD + LOAD, "importing", "/home/me/train.py:6"),
        (MODEL, "building", "/home/me/train.py:4"),
        (MODULE + LOADED, "loading", "/home/me/train.py:2"),
        (LAYER + MODULE + LOADED, "loading", "/home/me/layers.py:9"),
        (IMPORT + MODULE + LOADED, "importing", "/home/me/train.py:2"),
        (IMPORT + WORKER, "importing", ""),
        (LAYER + WORKER, "preparing", "/home/me/layers.py:9"),
        (WORKER, "preparing", ""),
    ],
)
def test_the_user_s_function_is_distinguished_from_their_file_and_from_imports(
    frames: list[tuple[str, int, str]], step: str, where: str
) -> None:
    """The line is the innermost of the user's own."""
    other = dump(
        [("/usr/lib/threading.py", 355, "wait"), ("/home/me/loader.py", 3, "fetch")], "Thread"
    )
    stack = read_stack(f"a warning of the framework\n{other}\n{dump(frames)}and more\n")
    assert stack is not None
    assert (stack.step, stack.where) == (step, where)
    assert "loader.py" not in stack.text


def test_a_stack_that_is_not_whole_yet_is_none() -> None:
    """Up to every place at which a read may have ended."""
    whole = dump(LAYER + BUILD + LOAD)
    end = whole.index(" in main") + len(" in main")
    assert all(read_stack(whole[:cut]) is None for cut in range(end))
    assert read_stack(whole[:end]) is not None
