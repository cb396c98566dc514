"""A simulated training run for the demo, on two devices, one of which gets hot."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import msgspec

from evener.devices.simulated import SLOWDOWN_CELSIUS, SimulatedSource, catalogue
from evener.devices.snapshot_builder import SnapshotBuilder, TrainingRates
from evener.devices.types import DeviceSample, Snapshot, value
from evener.live.files import LastStep, LiveDevice, PendingShares, ShareChange, Training
from evener.plan.file import Plan
from evener.plan.solver import read_curves
from evener.training.rebalance import Rebalancer

CARDS = ("gtx1080ti", "gtx1080")
PAIR = f"sim:{','.join(CARDS)}"
PERIOD_SECONDS = 70.0
# seconds of each period between which the first device is hot
HOT_FROM = 10.0
HOT_UNTIL = 45.0
SLOWED = 0.3  # the fraction of its speed that the first device loses
WINDOW_SECONDS = 2.0  # seconds between two observations by the rule
NOISE = 0.004
STEPS_SHOWN = 8  # number of last steps shown, each a copy of the newest


class TrainingSource(SimulatedSource):
    """Simulated devices, and a simulated training run on them that reports like a real one.

    In each period of 70 seconds, the first device is hot for 35 seconds and loses 30 % of its
    speed. Rows then move to the other device, just as in `evener run`. `clock` returns monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(catalogue(CARDS), builder=SnapshotBuilder(TrainingRates(tuple), clock))
        self._clock = clock
        self._epoch = time.time() - clock()
        self._first: Training | None = None

    def train(self, plan: Plan) -> None:
        """Start training with the shares of `plan`, which must be for these devices.

        May be called from any thread.
        """
        shares = plan.layout.share
        names = [device.label for device in self.devices()]
        most = [share.most for share in shares]
        self._rule = Rebalancer(
            plan.layout.batches, read_curves(shares), most, passes=False, names=names
        )
        self._began_at = self._ticked = self._observed = self._clock()
        self._steps = 0.0
        self._changes = list[ShareChange]()
        first = Training(
            "simulated", plan.workload, 0.0, 0, 0.0, (), training="simulated", pid=os.getpid()
        )
        of_plan = {
            "plan_samples_per_second": plan.throughput.samples_per_second,
            "world": len(shares),
        }
        self._first = msgspec.structs.replace(first, step_spread=NOISE, **of_plan)

    def sample(self) -> Snapshot:
        """Return a reading of the devices, with the training run's reports once it has started."""
        if self._first is None:
            return super().sample()
        now = self._clock()
        hot = HOT_FROM <= (now - self._began_at) % PERIOD_SECONDS < HOT_UNTIL
        reports = self._train_until(now, SLOWED if hot else 0.0, self._first)
        snapshot = super().sample()
        devices = (
            _heat(snapshot.devices[0]) if hot else snapshot.devices[0],
            *snapshot.devices[1:],
        )
        return msgspec.structs.replace(
            snapshot, devices=devices, reports=reports, at_seconds=self._epoch + now
        )

    def _train_until(
        self, now: float, lost_speed: float, base_report: Training
    ) -> tuple[Training, ...]:
        """Advance the simulated training run to the time `now`, and return its ranks' reports.

        - `lost_speed`: the fraction of its speed that the first device has lost to heat.
        - `base_report`: the report to which the measurements are added.
        """
        # New shares take effect at the next reading.
        rows = self._rule.shares
        own = [self.machine.device_seconds(place, share, True) for place, share in enumerate(rows)]
        own = [
            random.gauss(work, NOISE * work) / (1 - lost_speed * (not place))
            for place, work in enumerate(own)
        ]
        step_s = max(own) + self.machine.sync_seconds(range(len(own)))
        self._steps += (now - self._ticked) / step_s
        self._ticked = now
        step = round(self._steps)
        changes = tuple(self._changes[-3:])
        report = msgspec.structs.replace(
            base_report,
            step=step,
            step_s=step_s,
            updated_at=self._epoch + now,
            changes=changes,
            pending=PendingShares(self._rule.windows_seen, self._rule.windows_needed),
        )
        if now - self._observed >= WINDOW_SECONDS:
            self._observed = now
            change = self._rule.observe(step, own, rows)
            if change is not None:
                self._changes.append(
                    ShareChange(step + 1, self._epoch + now, rows, change.shares, change.reason)
                )
        return tuple(self._of_rank(rank, report, rows[rank], own[rank]) for rank in range(len(own)))

    def _of_rank(self, rank: int, report: Training, rows: int, own_s: float) -> Training:
        device = self.devices()[rank]
        speed = rows / report.step_s
        self.set_load(rank, speed, rows)
        waiting_s = report.step_s - own_s
        live = LiveDevice(device.id, rank, rows, speed, rows, own_s, waiting_s, own_spread=NOISE)
        last = tuple(
            LastStep(number, 0.0, own_s, waiting_s, 0.0)
            for number in range(max(1, report.step - STEPS_SHOWN + 1), report.step + 1)
        )
        return msgspec.structs.replace(
            report, rank=rank, samples_per_second=speed, devices=(live,), last_steps=last
        )


def _heat(sample: DeviceSample) -> DeviceSample:
    """Return a copy of a reading with the temperature, clock and throttling of a hot device."""
    clock_mhz = value(round((1 - SLOWED) * (sample.clock_mhz.current or 0.0)))
    held = {
        "throttled_percent": value(100 * SLOWED),
        "throttle_reasons": ("heat (hardware)",),
        "clock_mhz": clock_mhz,
    }
    return msgspec.structs.replace(sample, temperature_celsius=value(SLOWDOWN_CELSIUS), **held)
