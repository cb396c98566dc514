"""The objectives that choose by speed alone."""

from __future__ import annotations

from evener.balancer.objectives.objective import Objective


class Speed(Objective):
    """Tokens/s where rows have lengths, else samples/s."""

    name = "throughput"
    summary = "tokens/s where rows have lengths, else samples/s"


class TokenSpeed(Objective):
    """Tokens/s, and nothing else."""

    name = "tokens"
    summary = "tokens/s"
    needs_lengths = True


class SampleSpeed(Objective):
    """Samples/s, even where rows have lengths."""

    name = "samples"
    summary = "samples/s, leaving lengths out"
    uses_lengths = False
