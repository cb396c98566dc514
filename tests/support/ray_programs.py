"""What is trained over the hosts of a Ray cluster: scripts of users, and plans over loopback addresses."""

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

LAUNCHED = """
import json, os, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
place = [os.environ["EVENER_HOST"], os.environ["EVENER_DEVICE"]]
number = config["task"]["index"]
written = Path(sys.argv[1], "new" + str(number))
written.write_text(json.dumps({"place": place, "workers": config["cluster"]["worker"]}))
written.rename(Path(sys.argv[1], f"{number}.json"))
print("hello", flush=True)
while len(list(Path(sys.argv[1]).glob("*.json"))) < 3:
    time.sleep(0.05)
sys.exit({0: 0, 1: 7}[number] if number < 2 else time.sleep(600))
"""

SURVIVING = """
import json, os, sys, time
from pathlib import Path
from evener.training.launched import launched_plan
config = json.loads(os.environ["TF_CONFIG"])
workers = config["cluster"]["worker"]
name = f"{len(workers)} {os.environ['EVENER_HOST']}"
plan = Path(launched_plan("plan.toml")).read_text()
written = Path(sys.argv[1], name + ".new")
written.write_text(json.dumps({"plan": plan, "workers": workers, "index": config["task"]["index"]}))
written.rename(Path(sys.argv[1], name + ".json"))
time.sleep(600 if len(workers) == 3 else 0)
"""

WAITING = """
import os, sys, time
open(os.path.join(sys.argv[1], os.environ["EVENER_HOST"]), "w").close()
time.sleep(600)
"""

SOON_SILENT = """
from evener.__main__ import main
from evener.tui.launch import cluster
cluster.HEAD_SECONDS, cluster.HEAD_SILENT_SECONDS = 1.0, 4.0
main()
"""  # `evener`, which waits for less time until it gives up a head: Ray burns a core until then


def plan_over(*devices: tuple[str, str], engine: str = "") -> Plan:
    """A plan for these devices of hosts, with 1, 5 and 2 rows."""
    shares = tuple(Share(name, i, "EPYC", 0, 0.0, host=host) for i, (name, host) in enumerate(devices))
    layout = make_layout("split" if len(shares) > 1 else "solo", shares, (1, 5, 2)[: len(shares)])
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
