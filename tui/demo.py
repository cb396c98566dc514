"""The app of `evener demo`: it searches over a simulated pair of cards, then trains on them by the
plan.
"""

from __future__ import annotations

from typing import Any

from evener.devices.sampler import Sampler

from .app import EvenerApp
from .base_app import SessionEnded
from .simulated_training import PAIR, TrainingSource

PACE = 0.25  # of real time that the search takes
INTERVAL_SECONDS = 0.5
FIRST_SECONDS = 1.0
READING_SECONDS = 12.0  # from the verdict to the training


class DemoApp(EvenerApp):
    """The app, which opens the screens of a search and of a training by itself; every key works as
    usual.
    """

    def __init__(self, **options: Any) -> None:
        self._cards = TrainingSource()
        publisher = Sampler(self._cards, INTERVAL_SECONDS)
        super().__init__(publisher, devices=PAIR, trainable=self._cards.devices(), **options)
        self._trains = False

    async def on_mount(self) -> None:
        """Show the cards for a moment first: what a search imports would delay the first
        picture.
        """
        self.set_timer(FIRST_SECONDS, self._search)

    def _search(self) -> None:
        from evener.balancer.request import Request

        self.start_session(Request(devices=PAIR, pace=PACE), self.trainable)
        self.action_show("balance")
        self.say(
            "A search over two simulated cards, at four times real speed. All keys work; q quits."
        )

    def on_session_ended(self, message: SessionEnded) -> None:
        """Leave time to read the verdict of the first search, then train by its plan."""
        if not self._trains and not message.fault:
            self._trains = True
            self.set_timer(READING_SECONDS, self._train)

    def _train(self) -> None:
        if self.balance.finished is not None:
            self._cards.train(self.balance.finished.plan)
            self.action_show("trainings")
            self.say(
                "A simulated training by the plan. In ten seconds SIM:0 gets hot: watch the "
                "shares follow."
            )
