"""Batches that a person chose, timed as a session that the app shows; it has no run and no plan."""

from __future__ import annotations

from collections.abc import Sequence

from evener.balancer.event_thread import EventThread
from evener.balancer.events import Observed, ProbeStarted, Started
from evener.balancer.request import Request
from evener.balancer.types import Belief, Observation, OutOfMemory, Probe, Timed

RUNS = 3
SECONDS = 10.0  # of each run without warm-up
BELIEF = Belief((), f"Times the batches that were asked for, {RUNS} times.")


class ProbeSession(EventThread):
    """Times one layout a few times. EvenerError if the devices or the batches are wrong."""

    def __init__(self, request: Request, batches: Sequence[int]) -> None:
        from evener.balancer.intake.job import take_in
        from evener.balancer.manual_run import choose_layout
        from evener.balancer.probes.make import make_prober
        from evener.balancer.store.locks import lock_devices
        from evener.system.state_folders import new_error_file

        super().__init__()
        self._resolved = take_in(request)
        devices = self._resolved.devices
        self._layout = choose_layout(len(devices), None, batches)
        self._locks = lock_devices("", [] if request.share else [devices[i] for i in self._layout.active])
        self._prober = make_prober(self._resolved, error_file=new_error_file())

    def close(self) -> None:
        """End every child and release the devices."""
        self.stop()
        self._prober.close()
        super().close()
        self._locks.close()

    def _work(self) -> None:
        """Ends after the last run, or after one that failed."""
        resolved = self._resolved
        labels = tuple(device.label for device in resolved.devices)
        self._events.put(Started("", labels, resolved.workload, None, 0, resolved.notes))
        for turn in range(RUNS):
            self._going.wait()
            if self._halt.is_set() or not isinstance(self._run(turn), Timed):
                return

    def _run(self, turn: int) -> Observation | None:
        probe = Probe(self._layout, "split" if self._layout.traits.together else "solo", SECONDS, turn, True)
        self._events.put(ProbeStarted(probe, self._prober.now()))
        for seen in self._prober.measure((probe,), self._events.put, self._halt):
            walls = int(isinstance(seen, OutOfMemory))
            self._events.put(Observed(seen, BELIEF, None, turn + 1, walls, self._prober.now()))
            return seen
        return None
