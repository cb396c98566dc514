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
from evener.workloads import registry
from evener.workloads.protocol import Place, Precision

from .intake import take_in
from .probes.fork_server import die_with_parent
from .request import Job, Request
from .result.words import refuse
from .store.locks import lock_job
from .types import Finding


def learn(job: Job, seconds: float) -> Request:
    """The job's request with the noise scale that its first device measures; RequestError where it can't."""
    if job.simulated or job.framework != "torch" or ":" not in job.workload:
        raise refuse(Finding("request.learn", {"workload": job.workload}))
    variables = {**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH", ""))}
    command = [sys.executable, "-m", __name__, f"{seconds}", msgspec.json.encode(job.request).decode()]
    with lock_job(job, [0]):
        ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise NoLayoutError(
            "--learn: the training failed; its message is above.", "Correct that, or leave --learn out."
        )
    found = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Request)
    if found.noise_scale is None:
        raise refuse(Finding("request.learned" if found.own_batch else "request.learn_batch", {"seconds": seconds}))
    return found


def main(request: Request, seconds: float) -> Request:
    """Train in this process, each batch in equal parts, none larger than a pass of the user's script, and measure."""
    job = take_in(request)
    made = child_environment(job.devices[:1], "torch")
    os.environ.update(made.variables)
    if made.cores:
        os.sched_setaffinity(0, made.cores)
    from evener.torch_split.noise import PassNoise  # with PyTorch, which reads these variables

    name, precision = find_backend(job.devices[0].kind).name_in("torch", 0), cast(Precision, request.precision)
    place = Place((name,), threads=made.threads, precision=precision)
    workload: Any = registry.build(job.workload, place, request.settings, "torch")  # PyTorch's alone
    own = workload.own_batch
    batch = request.own_batch or own
    if batch is None or batch < 2:
        return msgspec.structs.replace(request, own_batch=None)
    parts = max(2, math.ceil(batch / (workload.recipe.pass_rows or batch)))
    workload.prepare((batch // parts,))
    noise, end = PassNoise(every=1), time.monotonic() + seconds
    while time.monotonic() < end:
        workload.learn(parts, noise)
    return msgspec.structs.replace(request, own_batch=batch, noise_scale=noise.scale())


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C: the parent gets it too, and kills this process
    try:
        learned = main(msgspec.json.decode(sys.argv[2], type=Request), float(sys.argv[1]))
    except EvenerError as fault:
        sys.exit(f"evener: {fault.message} {fault.remedy}")
    print("\n" + msgspec.json.encode(learned).decode(), flush=True)
