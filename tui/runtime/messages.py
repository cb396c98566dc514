"""Messages from the threads to the app; a slow screen skips all but the newest of a kind."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from evener.balancer.events import Event, ProbeProgress
from evener.devices.types import Snapshot


@dataclass
class Sampled(Message):
    """One tick of the sampler."""

    snapshot: Snapshot

    def can_replace(self, message: Message) -> bool:
        """A newer tick replaces one that is still waiting."""
        return isinstance(message, Sampled)


@dataclass
class SessionReported(Message):
    """An event of a session, or of the replay of one; `source` is its number."""

    source: int
    event: Event

    def can_replace(self, message: Message) -> bool:
        """Only progress of the same probe is replaced; every other event counts."""
        return (
            isinstance(message, SessionReported)
            and isinstance(message.event, ProbeProgress)
            and isinstance(self.event, ProbeProgress)
            and message.source == self.source
            and message.event.probe == self.event.probe
        )


@dataclass
class SessionEnded(Message):
    """A session's thread has ended; `fault` and `remedy` say why if it failed."""

    source: int
    fault: str = ""
    remedy: str = ""
