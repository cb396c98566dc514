"""List the sockets on which a training run on this machine's GPUs listens.

  python -m benchmarks.gpu_ports                      # all GPUs, NCCL
  python -m benchmarks.gpu_ports --devices cpu/2      # tried without a GPU: gloo

`evener launch` and `evener run` train a small model one after the other; each line is a socket with
the process that owns it. Exits with 1 if a socket isn't bound to loopback, or belongs to the
launcher itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from evener.devices.discover import discover
from evener.launch.program import make_plan
from evener.plan.file import Share
from tests.support.listeners import ListenerLog

PROGRAM = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evener

evener.load_plan(os.environ["EVENER_PLAN"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
for _ in range(2):
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    model = DistributedDataParallel(torch.nn.Linear(64, 8).to(device))
    for _ in range(50):
        model(torch.ones(16, 64, device=device)).sum().backward()
    dist.destroy_process_group()
print("trained with", "NCCL" if on_gpu else "gloo")
"""


def main() -> None:
    """Train by both commands and print the sockets that were opened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="gpu", help="as --devices of evener")
    devices = discover(parser.parse_args().devices).devices
    shares = [Share(each.id, each.index, each.name, 0, 0.0) for each in devices]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        plan, script = Path(folder, "plan.toml"), Path(folder, "train.py")
        make_plan("train.py", shares, [1] * len(shares)).save(plan)
        script.write_text(PROGRAM)
        for words in (
            ("launch", str(plan), str(script)),
            ("run", "--plan", str(plan), "--", sys.executable, str(script)),
        ):
            wrong += watch(words)
    sys.exit(1 if wrong else 0)


def watch(words: tuple[str, ...]) -> int:
    """Print the sockets of a command and return the number of wrong ones.

    A socket is wrong if it isn't bound to loopback, or if it is the command's own.
    """
    evener = subprocess.Popen([sys.executable, "-m", "evener", *words])
    with ListenerLog(evener.pid) as log:
        code = evener.wait()
    print(f"{words[0]}: exit code {code}, {log.looks} looks, {len(log.seen)} sockets")
    for each in sorted(log.seen, key=lambda each: each.pid):
        whose = "the launcher" if each.pid == evener.pid else f"process {each.pid}"
        print(f"  {each.address}:{each.port} of {whose}")
    wrong = [each for each in log.seen if not each.on_loopback or each.pid == evener.pid]
    return len(wrong) + bool(code)


if __name__ == "__main__":
    main()
