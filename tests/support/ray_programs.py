"""User scripts for training on the hosts of a Ray cluster, and plans with loopback addresses."""

from __future__ import annotations

import msgspec

from evener.plan.file import Fingerprint, Plan, SearchSummary, Share, Throughput, make_layout

SCRIPT = """
import torch
import sizes

class Model(torch.nn.Linear):
    def forward(self, rows):
        assert len(rows) < 64, "too many"
        return super().forward(rows)

def build(width=4):
    model = Model(sizes.INPUTS, width)
    return model, torch.optim.SGD(model.parameters(), 0.01), torch.nn.functional.mse_loss

def sample_batch(n):
    return torch.ones(n, sizes.INPUTS), torch.ones(n, 4)
"""

SURVIVING = """
import json, os, sys, time
from pathlib import Path
from evener.training.launched import launched_plan
config = json.loads(os.environ["TF_CONFIG"])
workers, index = config["cluster"]["worker"], config["task"]["index"]
place = [os.environ["EVENER_HOST"], os.environ["EVENER_DEVICE"]]
plan = Path(launched_plan("plan.toml")).read_text()
written = Path(sys.argv[1], f"{len(workers)} {index}.new")
written.write_text(json.dumps({"plan": plan, "workers": workers, "place": place}))
written.rename(written.with_suffix(".json"))
print("hello", flush=True)
while len(workers) == 3 and index == 1:
    if len(list(Path(sys.argv[1]).glob("3*.json"))) == 3:
        sys.exit(7)
    time.sleep(0.05)
time.sleep(600)
"""

WAITING = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["EVENER_HOST"]), "w").close()
time.sleep(600)
"""

WAITING_ONCE = """
import os, sys, time
started = os.path.join(sys.argv[1], os.environ["EVENER_HOST"])
if os.path.exists(started):
    sys.exit(0)
open(started, "w").close()
time.sleep(600)
"""

IMPATIENT = """
from evener.__main__ import main
from evener.launch import cluster
cluster.HEAD_SECONDS, cluster.HEAD_SILENT_SECONDS, cluster.PEER_SECONDS = 0.2, 0.6, 1.0
main()
"""
# `evener` with a shorter wait for the head or for other hosts, since Ray keeps a core busy
# meanwhile


def plan_over(*devices: tuple[str, str], engine: str = "") -> Plan:
    """Return a plan for devices of these hosts, with 1, 5, 2 and 2 rows."""
    shares = tuple(
        Share(name, i, "EPYC", 0, 0.0, host=host) for i, (name, host) in enumerate(devices)
    )
    layout = make_layout(
        "split" if len(shares) > 1 else "solo", shares, (1, 5, 2, 2)[: len(shares)]
    )
    return Plan(
        created="2026-11-22T12:00:00Z",
        workload="torch_mnist",
        framework="torch",
        precision="float32",
        xla=False,
        layout=msgspec.structs.replace(layout, engine=engine),
        throughput=Throughput(100.0, 99.0, 101.0),
        evidence=(),
        search=SearchSummary(1, 0, 1.0, 0, "test"),
        fingerprint=Fingerprint((), "", {}, ""),
    )
