"""Detect scripts that were launched with a plan, but don't read it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Container
from contextlib import suppress

PLAN_USED = "EVENER_PLAN_USED"  # names the file to which a process writes when it reads a plan
OPTION = "--no-plan-check"
# markers that processes write to that file
_READ = b"."
_EXPLAINED = b"!"

# The lines to add to a script, by the library that it imports; the first match is used.
_LINES = {
    "transformers": (
        "from evener.huggingface import with_plan",
        "with_plan(Trainer)(model=..., args=..., train_dataset=...).train()",
    ),
    "lightning": (
        "from evener.torch import Split",
        "split = Split()",
        "trainer = Trainer(strategy=split.strategy(), use_distributed_sampler=False)",
        "trainer.fit(module, split.loader(dataset))",
    ),
    "keras": (
        "from evener.keras import Split",
        "split = Split()  # before the first tensor or model",
        "model = split.build(make_model)  # make_model() returns a compiled model",
    ),
    "torch": (
        "from evener.torch import Split",
        "split = Split()",
        "loader, model = split.loader(dataset), split.wrap(model)",
        "loss = split.step(batch, compute)  # in the loop: forward and backward",
    ),
}
_SAME = {"pytorch_lightning": "lightning", "tensorflow": "keras", "trl": "transformers"}


def note_use() -> None:
    """Record, for the launcher, that this process has read its plan."""
    path = os.environ.get(PLAN_USED)
    if path:
        with suppress(OSError), open(path, "ab") as stream:  # the launcher may have ended
            stream.write(_READ)


def is_used(path: str) -> bool:
    """Return True if any process has read the plan, or if that can't be determined.

    `path` is the file in which processes record that they have read it.
    """
    try:
        with open(path, "rb") as stream:
            return _READ in stream.read()
    except OSError:
        return True


def explain_once(path: str, message: str) -> None:
    """Print a message to standard error, unless another process has already printed it.

    The processes record in the file at `path` that the message was printed. Raises OSError if the
    file no longer exists.
    """
    # the other processes wait, because the launcher stops all of them once one has exited
    with open(path, "r+b", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if _EXPLAINED in stream.read():
            return
        print(message, file=sys.stderr, flush=True)
        stream.write(_EXPLAINED)


def describe_unused(imported: Container[str], program: bool) -> str:
    """Return a message about a script that doesn't read its plan, with the lines to add to it.

    The lines are for the library that the script uses, among those in `imported`. If `program` is
    True, the message also suggests `evener run`.
    """
    known = [*_LINES, *_SAME]
    found = [_SAME.get(name, name) for name in known if name in imported]
    library = next((name for name in _LINES if name in found), "torch")
    lines = "".join(f"\n    {line}" for line in _LINES[library])
    other = (
        "A program that trains on several GPUs by itself needs no line: evener run -- "
        "python train.py. "
    )
    return (
        "no process has read the plan, so each would train alone, on all rows. Add to the "
        f"script:{lines}\n{other if program else ''}If it divides the rows itself, launch it "
        f"with {OPTION}."
    )
