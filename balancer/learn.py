"""A short training of a workload at its script's own batch, on one device, that measures the gradient's noise scale.

A batch is computed in two or more equal parts, which are compared; the search then starts anew.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from typing import Any, cast

import msgspec

from evener.devices.registry import child_environment, find_backend, import_path
from evener.errors import EvenerError, NoLayoutError
from evener.learning.noise_scale import NoiseScale
from evener.workloads import registry
from evener.workloads.protocol import Place, Precision

from .probes.fork_server import die_with_parent
from .request import Job, Request
from .result.words import refuse
from .store.locks import lock_devices
from .types import Finding


class Lesson(msgspec.Struct, frozen=True):
    """The training of a child, and how long it takes."""

    workload: str
    settings: dict[str, object]
    place: Place
    cores: tuple[int, ...]
    batch: int | None  # None: the workload's own
    seconds: float


class Learned(msgspec.Struct, frozen=True):
    """The noise scale, and the batch that was trained; None where the steps were too few or the batch isn't known."""

    batch: int | None
    scale: NoiseScale | None = None


def learn(job: Job, seconds: float) -> Request:
    """The job's request with the noise scale that its first device measures; RequestError where it can't."""
    request, device = job.request, job.devices[0]
    if job.simulated or job.framework != "torch" or ":" not in job.workload:
        raise refuse(Finding("request.learn", {"workload": job.workload}))
    made = child_environment([device], "torch")
    name, precision = find_backend(device.kind).name_in("torch", 0), cast(Precision, request.precision)
    place = Place((name,), threads=made.threads, precision=precision)
    lesson = Lesson(job.workload, request.settings, place, made.cores, request.own_batch, seconds)
    variables = {**os.environ, **made.variables, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", ""))}
    command = [sys.executable, "-m", __name__, msgspec.json.encode(lesson).decode()]
    with lock_devices("", job.exclusive([0])):
        ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise NoLayoutError(
            "--learn: the training failed; its message is above.", "Correct that, or leave --learn out."
        )
    found = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Learned)
    if found.scale is None:
        raise refuse(Finding("request.learned" if found.batch else "request.learn_batch", {"seconds": seconds}))
    return msgspec.structs.replace(request, noise_scale=found.scale, own_batch=found.batch)


def main(lesson: Lesson) -> Learned:
    """Train in this process, and measure: each batch in equal parts, none larger than a pass of the user's script."""
    from evener.torch_split.noise import PassNoise  # with PyTorch, which the parent does without

    if lesson.cores:
        os.sched_setaffinity(0, lesson.cores)
    workload: Any = registry.build(lesson.workload, lesson.place, lesson.settings, "torch")  # PyTorch's alone
    own = workload.own_batch
    batch = lesson.batch or own
    if batch is None or batch < 2:
        return Learned(None)
    parts = max(2, math.ceil(batch / (workload.recipe.pass_rows or batch)))
    workload.prepare((batch // parts,))
    noise, end = PassNoise(every=1), time.monotonic() + lesson.seconds
    while time.monotonic() < end:
        workload.learn(parts, noise)
    return Learned(batch, noise.scale())


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C: the parent gets it too, and kills this process
    try:
        learned = main(msgspec.json.decode(sys.argv[1], type=Lesson))
    except EvenerError as fault:
        sys.exit(f"evener: {fault.message} {fault.remedy}")
    print("\n" + msgspec.json.encode(learned).decode(), flush=True)
