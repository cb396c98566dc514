"""What measuring the noise scale costs a step: turns with and without it, one after the other, in
one training.

    python -m benchmarks.gpu_noise [--turns 24] [--every 8 1] [--rows 32] [--passes 1] [--json FILE]

A decoder-only model of 100 million parameters, in float32 under bfloat16 autocast, over NCCL on one
GPU; where there is none, one of 2 million on one core, over gloo. A turn is 16 steps (or as many as
have one that is looked at), and each figure the median of the ratios of a turn to the mean of its
two neighbours. `--every`: of how many steps one is looked at; with 1 it is each, and its cost
divided by 8, 16 or 32 says what theirs is with less noise. `--passes 4`: what it costs one process
whose steps take four passes of these rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu_steps import WORDS, Decoder
from evener.torch_split.exchange import Exchange
from evener.torch_split.noise import NoiseSampler, PassNoise, RankNoise
from evener.torch_split.wrapped import wrap_module
from evener.training.noise_scale import EVERY
from tests.support.torch_start import free_port

STEPS = 16
SIZE = (
    (768, 13, 32, 256) if torch.cuda.is_available() else (128, 8, 16, 32)
)  # width, layers, rows, tokens


class Training:
    """Steps of one model, with a sampler or without."""

    def __init__(self, device: torch.device, rows: int, passes: int) -> None:
        width, layers, _, tokens = SIZE
        self.device, self.rows, self.passes = device, rows, passes
        self.model: Any = Decoder(width, layers).to(device)
        if passes > 1:
            self.exchange = Exchange(self.model, alone=True)
        else:
            self.model = wrap_module(self.model, device)
            self.exchange = self.model.exchange
        self.words = torch.randint(0, WORDS, (rows, tokens), device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, fused=device.type == "cuda"
        )
        self.steps = 0

    def sampler(self, every: int) -> NoiseSampler:
        """What looks at its gradients."""
        return PassNoise(every=every) if self.passes > 1 else RankNoise(every=every)

    def turn(self, noise: NoiseSampler | None, steps: int = STEPS) -> float:
        """Seconds of a turn; of this process's CPU where there is no GPU."""
        gpu = self.device.type == "cuda"
        clock = time.perf_counter if gpu else time.process_time
        self.exchange.noise = None
        if noise is not None:
            noise.attach(self.exchange)
        if gpu:
            torch.cuda.synchronize()
        began = clock()
        for _ in range(steps):
            self._step(noise)
        if isinstance(noise, PassNoise):
            noise.begin((self.rows,), self.steps + 1)  # ends the last step
            noise.leave_out()
        if noise is not None:
            noise.scale()
        if gpu:
            torch.cuda.synchronize()
        return clock() - began

    def _step(self, noise: NoiseSampler | None) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            if noise is not None:  # as if another rank had as many rows, where it is one pass
                noise.begin((self.rows,) * (2 if self.passes == 1 else 1), self.steps)
            with (
                torch.autocast("cuda", torch.bfloat16)
                if self.device.type == "cuda"
                else nullcontext()
            ):
                loss = nn.functional.cross_entropy(
                    self.model(self.words).flatten(0, 1), self.words.flatten()
                )
            (loss / self.passes).backward()
        self.optimizer.step()


def compare(training: Training, every: int, turns: int) -> list[float]:
    """The ratio of each turn with noise to the mean of those beside it without."""
    noise, steps = training.sampler(every), max(STEPS, every)
    training.turn(noise, steps)
    times = [training.turn(noise if turn % 2 else None, steps) for turn in range(2 * turns + 1)]
    return [2 * times[i] / (times[i - 1] + times[i + 1]) for i in range(1, len(times), 2)]


def main() -> None:
    """Print the cost of each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--every", type=int, nargs="+", default=[EVERY, 1])
    parser.add_argument("--rows", type=int, default=SIZE[2])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1"
    )
    device = torch.device("cuda:0" if gpu else "cpu")
    if not gpu:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    training = Training(device, given.rows, given.passes)
    millions = sum(each.numel() for each in training.model.parameters()) / 1e6
    training.turn(None)
    step_ms = training.turn(None) / STEPS * 1e3
    found: dict[str, Any] = {"millions": millions, "step_ms": step_ms}
    for every in given.every:
        way = f"one step of {every}"
        ratios = sorted(compare(training, every, given.turns))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        found[way] = {"median": statistics.median(ratios), "middle half": (low, high)}
        print(
            f"{millions:.0f} M parameters, {step_ms:.1f} ms a step, {way}: "
            f"{statistics.median(ratios) - 1:+.2%}"
            f" ({low - 1:+.2%} to {high - 1:+.2%})",
            file=sys.stderr,
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
