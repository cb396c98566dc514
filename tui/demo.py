"""The demo: a search and a training run on two simulated devices, without a GPU."""

from __future__ import annotations

from typing import Any

from evener.balancer.store.runs import read_run
from evener.devices.sampler import Sampler
from evener.errors import EvenerError
from evener.plan.file import Plan

from .app import EvenerApp
from .base_app import SessionEnded
from .simulated_training import HOT_FROM, HOT_UNTIL, PAIR, TrainingSource

REPLAY_SPEED = 4.0  # replay speed relative to the search
INTERVAL_SECONDS = 0.5
FIRST_SECONDS = 1.0
RESULT_SECONDS = 8.0  # seconds to read the result before the replay
READING_SECONDS = 8.0  # seconds from the end of the replay to the training
RESULT = "The result first: what two unequal cards gain when each gets the rows that it can handle."
STORY = (
    "How it was found: each card alone, real splits, then a race in turns. Four times real speed."
)
TRAINING = f"A training with the plan. In {HOT_FROM:.0f} s SIM:0 gets hot: watch the shares follow."
HOT = "SIM:0 is hot and slower: the other card gets more rows, and both end together again."
COOL = "SIM:0 has cooled down: its rows come back. Now with your own model: evener"


class DemoApp(EvenerApp):
    """The app as a guided demo, which shows a search, a replay of it, and a training run."""

    def __init__(self, **options: Any) -> None:
        self._cards = TrainingSource()
        publisher = Sampler(self._cards, INTERVAL_SECONDS)
        super().__init__(publisher, devices=PAIR, trainable=self._cards.devices(), **options)
        self._plan: Plan | None = None
        self._trains = False

    async def on_mount(self) -> None:
        """Schedule the demo's search for one second after the app has opened."""
        self.set_timer(FIRST_SECONDS, self._search)

    def closing_lines(self, width: int | None) -> list[str]:
        """Return the line to print after the app has closed."""
        return ["Nothing was measured, and nothing was kept. With your own cards: evener"]

    def _search(self) -> None:
        from evener.balancer.request import Request

        self.start_session(Request(devices=PAIR, pace=0.0), self.trainable)
        self.action_show("balance")

    def on_session_ended(self, message: SessionEnded) -> None:
        """Continue with the next part of the demo when the search or its replay has ended."""
        finished = self.balance.finished
        if message.fault or finished is None:
            return
        if self._plan is None:
            self._plan = finished.plan
            self._show_caption(RESULT)
            self.set_timer(RESULT_SECONDS, self._replay_search)
        elif self.replays and not self._trains:
            self._trains = True
            self.set_timer(READING_SECONDS, self._train)

    def _replay_search(self) -> None:
        """Replay the search at four times its speed, unless another search is running."""
        try:
            record = read_run(self.last_run)
        except EvenerError:
            return
        if not self.is_searching:
            self.replay(record, REPLAY_SPEED)
            self._show_caption(STORY)

    def _train(self) -> None:
        if self._plan is not None:
            self._cards.train(self._plan)
            self.action_show("trainings")
            self._show_caption(TRAINING)
            self.set_timer(HOT_FROM, lambda: self._show_caption(HOT))
            self.set_timer(HOT_UNTIL, lambda: self._show_caption(COOL))

    def _show_caption(self, text: str) -> None:
        """Show a caption for seven seconds."""
        self.notify(text, title="Demo: all keys work, q quits", timeout=7.0, markup=False)
