"""The words of a dry run, and the largest model that devices could train by their memory alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..request import Job
from ..types import Finding

ADAMW_BYTES = 16  # of a parameter in float32: itself, its gradient and two averages
SENTENCES = {
    "outlook.steps": "{workload}{framework:framework} was {start_seconds:built} on {device}: a step took"
    " {steps:stepped}",
    "outlook.simulated": "A simulated model was {start_seconds:built} on {device}: a step took {steps:stepped}",
    "outlook.search": "A search takes at most {budget_seconds:duration}",
    "outlook.largest_model": "AdamW in float32 trains at most {whole:millions} parameters where each device holds the"
    " model, and {sharded:millions} in shards (split.shard), by memory alone: gathered units and activations take some",
    "outlook.nothing_kept": "Nothing was kept",
    "failure.shards": "in shards its state of {state_bytes:size} doesn't fit either: the devices have"
    " {memory_bytes:size} in all, for that and, on each, {gathered_bytes:size} of gathered units and the activations of"
    " a row",
    "failure.shards_row": "in shards {devices:and} ran out of memory too, without the state",
    "failure.shards_failed": "in shards it failed: {why}",
    "remedy.shards": "Free some of its memory, or run evener balance, which also tries the model in shards over all of"
    " the devices.",
}


def find_largest_model(job: Job) -> Iterator[Finding]:
    """The most parameters that the devices hold whole and in shards, where the workload can be sharded."""
    sizes = [size for size in job.problem.memory_bytes if size is not None]
    sharded = job.machine.shards is not None if job.machine is not None else job.problem.shards
    if sharded and job.problem.devices > 1 and len(sizes) == job.problem.devices:
        whole, shards = min(sizes) // ADAMW_BYTES, sum(sizes) // ADAMW_BYTES
        yield Finding("outlook.largest_model", {"whole": whole, "sharded": shards})


def write_millions(count: int) -> str:
    """A large number in short: 740 million, 2.1 billion."""
    return f"{count / 1e9:.1f} billion" if count >= 999.5e6 else f"{count / 1e6:.3g} million"
