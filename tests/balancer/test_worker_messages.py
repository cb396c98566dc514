"""A child's reply is accepted only if it can be true. Anything else is an invalid reply, not a
traceback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer.probes import protocol
from evener.balancer.probes.protocol import (
    Build,
    Built,
    ChildError,
    InvalidReply,
    Prepare,
    Prepared,
    Ran,
    Ready,
    RunSteps,
    parse_reply,
)
from evener.workloads.protocol import WorkerSetup
from evener.workloads.user_code import find_line

COMMANDS = [
    Build(
        "synthetic", "none", {"base_ms": 1.0}, WorkerSetup(("CPU:0",), (None,), 1, ("a:1", "b:2"))
    ),
    Prepare((8, 0)),
    RunSteps(5),
]
REPLIES = [
    Ready(),
    Built({"version": "2.21.0"}),
    Prepared(0.5),
    Ran(5, 0.1, 0.09, 0.0, (None, 5), 3),
    ChildError(("ValueError",), "no\nway", "train.py:3"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_travel_whole(command: protocol.Command) -> None:
    """Each command is one line."""
    text = protocol.encode_line(command)
    assert text.count(b"\n") == 1
    assert protocol.command_decoder.decode(text) == command


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_replies_travel_whole(reply: protocol.Reply) -> None:
    """Each reply is one line, even if its text has line breaks."""
    assert parse_reply(protocol.encode_line(reply).rstrip(b"\n")) == reply


@pytest.mark.parametrize(
    "impossible",
    [
        {
            "type": "Ran",
            "steps": 0,
            "wall_seconds": 1,
            "cpu_seconds": 1,
            "spun_seconds": 0,
            "memory_bytes": [1],
        },
        {
            "type": "Ran",
            "steps": 5,
            "wall_seconds": 0,
            "cpu_seconds": 1,
            "spun_seconds": 0,
            "memory_bytes": [1],
        },
        {
            "type": "Ran",
            "steps": 5,
            "wall_seconds": 1e300,
            "cpu_seconds": 1,
            "spun_seconds": 0,
            "memory_bytes": [1],
        },
        {
            "type": "Ran",
            "steps": 5,
            "wall_seconds": 1,
            "cpu_seconds": -1,
            "spun_seconds": 0,
            "memory_bytes": [1],
        },
        {
            "type": "Ran",
            "steps": 5,
            "wall_seconds": 1,
            "cpu_seconds": 1,
            "spun_seconds": 0,
            "memory_bytes": [],
        },
        {
            "type": "Ran",
            "steps": 5,
            "wall_seconds": 1,
            "cpu_seconds": 1,
            "spun_seconds": 0,
            "memory_bytes": [-4],
        },
        {"type": "Prepared", "first_step_seconds": -3},
        {"type": "Built", "facts": {"version": 3}},
        {"type": "RunSteps", "steps": 5},
        {"type": "Nothing"},
        [],
    ],
)
def test_what_can_t_be_true_is_invalid(impossible: object) -> None:
    """It has numbers that no clock gives, messages of the other side, or unknown messages."""
    assert isinstance(parse_reply(msgspec.json.encode(impossible)), InvalidReply)


@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=100).map(lambda text: text.encode(errors="replace")),
    )
)
def test_any_bytes_are_a_reply_or_invalid(text: bytes) -> None:
    """The text of an invalid reply is bounded."""
    reply = parse_reply(text)
    assert not isinstance(reply, InvalidReply) or len(reply.text) <= 80


@given(st.sampled_from(REPLIES), st.data())
def test_damaged_replies_are_replies_or_invalid(reply: protocol.Reply, data: st.DataObject) -> None:
    """A byte is changed, removed or inserted."""
    text = bytearray(protocol.encode_line(reply))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    parse_reply(bytes(text))


def test_the_user_s_line_is_the_last_one_outside_of_installed_packages(tmp_path: Path) -> None:
    """It is found even if the error passes through a package, or if only its text names a line."""
    source = tmp_path / "own.py"
    source.write_text("import json\ndef load():\n    return json.loads('{')\n")
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    with pytest.raises(ValueError, match="Expecting") as caught:
        space["load"]()
    assert find_line(caught.value) == f"{source}:3"
    text = (
        f'in user code:\n\n    File "{source}", line 2, in call\n\n    File '
        f'"{json.__file__}", line 9, in loads'
    )
    assert find_line(ValueError(text)) == f"{source}:2"
    assert find_line(ValueError('File "\0.py", line 2')) == ""
