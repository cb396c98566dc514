"""Messages from the threads to the app; a slow screen skips all but the newest of a kind."""

from __future__ import annotations

from textual.message import Message

from evener.balancer.events import Event, ProbeProgress
from evener.devices.types import Snapshot


class Sampled(Message):
    """One tick of the sampler."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def can_replace(self, message: Message) -> bool:
        """A newer tick replaces one that is still waiting."""
        return isinstance(message, Sampled)


class SessionReported(Message):
    """An event of a session, or of the replay of one; `source` is its number."""

    def __init__(self, source: int, event: Event) -> None:
        super().__init__()
        self.source = source
        self.event = event

    def can_replace(self, message: Message) -> bool:
        """Only progress of the same probe is replaced; every other event counts."""
        return (
            isinstance(message, SessionReported)
            and isinstance(message.event, ProbeProgress)
            and isinstance(self.event, ProbeProgress)
            and message.source == self.source
            and message.event.probe == self.event.probe
        )


class SessionEnded(Message):
    """A session's thread has ended; `fault` and `remedy` say why if it failed."""

    def __init__(self, source: int, fault: str = "", remedy: str = "") -> None:
        super().__init__()
        self.source = source
        self.fault = fault
        self.remedy = remedy
