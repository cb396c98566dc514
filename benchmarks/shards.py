"""Sharded models: step times next to FSDP2's, the largest model, exactness and checkpoints.

  python -m benchmarks.shards step  [--ranks 2] [--json FILE]   # equal and uneven shards
  python -m benchmarks.shards fit   [--ranks 2] [--caps 24 8] [--params 1.6e9] [--equal]
  python -m benchmarks.shards sweep [--caps 60 20]   # on CPUs, by evener's own memory count
  python -m benchmarks.shards exact [--ranks 2] [--folder DIR]
  python -m benchmarks.shards abort [--ranks 2]      # the last rank runs out of memory

Ranks use NCCL with a GPU each, or gloo on CPUs or with `--one-gpu` for all ranks. Caps are GiB of a
GPU's allocator, or MB of evener's own count on CPUs. `fit` creates the model on the meta device, so
no host holds it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_steps import GPU, WORDS, Decoder, start
from evener.errors import DeviceError
from evener.torch import Split
from evener.torch.shards.unit import choose_units
from evener.torch.shards.whole import estimate_gathered_bytes

LENGTH = 256 if GPU else 16
STATE_BYTES = 16  # per parameter in float32: the value, its gradient, and two of AdamW
# of AdamW, as gradients of keys' biases are 0 but for their rounding, which it would take for
# gradients
EPS = 1e-5
WARM_UP, STEPS = (4, 8) if GPU else (3, 6)


def make_split(rows: Sequence[int], options: argparse.Namespace) -> Split:
    """Return a split of these rows over the ranks, without a plan."""
    return Split(
        ratios=list(rows),
        global_batch=sum(rows),
        backend="gloo" if options.one_gpu or not GPU else None,
    )


class Variant:
    """A sharded model with its optimizer, whose steps can be timed."""

    def __init__(self, model: Any, split: Split, rows: Sequence[int], dtype: Any) -> None:
        self.model, self._split, self._rows, self._dtype = model, split, tuple(rows), dtype
        device = split.device
        self._words = torch.randint(0, WORDS, (rows[split.rank], LENGTH), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.ms: list[float] = []

    def step(self) -> float:
        """Run a training step and return the loss of this rank's rows."""
        self._split.begin(self._rows)
        logits = self.model(self._words).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), self._words.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def take_turn(self, steps: int) -> None:
        """Time some steps, starting when all ranks are ready."""
        synchronize(self._split.device)
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self._split.device)
        self.ms.append((time.perf_counter() - started) / steps * 1e3)


def synchronize(device: torch.device) -> None:
    """Wait for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def by_fsdp(model: Any, device: torch.device, dtype: Any) -> Any:
    """Shard the model by FSDP2, with each block as a unit."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    model = model.to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Time FSDP2, equal shards, and uneven shards with the same rows, in turns."""
    world = options.ranks
    rows, dtype = (options.rows,) * world, torch.bfloat16 if GPU else None
    split = make_split(rows, options)
    uneven = [3.0, *[1.0] * (world - 1)]
    ways = {
        "fsdp2": Variant(
            by_fsdp(Decoder(options.width, options.layers), split.device, dtype), split, rows, dtype
        ),
        "shards": shards(split, options, rows, [1.0] * world, dtype),
        "uneven shards": shards(split, options, rows, uneven, dtype),
    }
    for way in ways.values():
        for _ in range(WARM_UP):
            way.step()
    for turn in range(options.turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            ways[name].take_turn(STEPS)
    ratios = {
        name: [own / its for own, its in zip(way.ms, ways["fsdp2"].ms, strict=True)]
        for name, way in ways.items()
    }
    return {
        "size": (options.width, options.layers, options.rows, world),
        "ms": {name: round(statistics.median(way.ms), 2) for name, way in ways.items()},
        "to fsdp2": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "middle half": {
            name: statistics.quantiles(each, n=4)[::2] for name, each in ratios.items()
        },
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else 0,
    }


def shards(
    split: Split, options: Any, rows: Sequence[int], parts: Sequence[float], dtype: Any
) -> Variant:
    """Shard the model by evener, with each block as a unit."""
    model = split.shard(
        Decoder(options.width, options.layers), state=parts, dtype=dtype, units=options.units
    )
    return Variant(model, split, rows, dtype)


def expect(model: Any, options: Any, dtype: Any) -> int:
    """Return the largest number of bytes that a rank should hold besides its part of the state.

    Called before the model is sharded.
    """
    return estimate_gathered_bytes(model, choose_units(model, options.units), dtype)


def fit(options: argparse.Namespace) -> dict[str, Any]:
    """Train a model of `params` parameters under the caps.

    The state is divided by memory, or equally.
    """
    split = make_split(
        [max(1, round(8 * each / sum(options.caps))) for each in options.caps], options
    )
    cap = options.caps[split.rank]
    if GPU:
        total = torch.cuda.get_device_properties(split.device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap * 2**30 / total, split.device)
    width, layers = options.width, max(1, round(options.params / (12 * options.width**2)))
    with torch.device("meta"):
        model = Decoder(width, layers)
    dtype = torch.bfloat16 if GPU else None
    beside, count = expect(model, options, dtype), sum(each.numel() for each in model.parameters())
    parts = (
        [1.0] * len(options.caps)
        if options.equal
        else [each - options.beside for each in options.caps]
    )
    outcome: dict[str, Any] = {"rank": split.rank, "cap GiB": cap, "layers": layers}
    began = time.perf_counter()
    try:
        model = split.shard(model, state=parts, dtype=dtype, units=options.units)
        draw(model)
        way = Variant(model, split, split.shares, None)
        outcome["losses"] = [way.step() for _ in range(2 if options.one_gpu else 3)]
        ledger = model.exchange.ledger
        outcome |= {
            "ledger GiB": round(ledger.peak / 2**30, 3),
            "to expected": round(
                ledger.peak / (beside + parts[split.rank] / sum(parts) * count * STATE_BYTES), 4
            ),
            "state GiB of all": round(count * STATE_BYTES / 2**30, 2),
        }
    except (torch.OutOfMemoryError, DeviceError) as error:
        outcome["out of memory"] = str(error).partition("\n")[0][:160]
    if GPU:
        outcome["allocator GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    outcome["seconds"] = round(time.perf_counter() - began, 1)
    if split.rank or "out of memory" in outcome:
        print(json.dumps(outcome), flush=True)
    if "out of memory" in outcome:
        os._exit(3)  # the other ranks wait for this one in a unit
    return outcome


def draw(model: Any) -> None:
    """Initialize the shards of a model from the meta device."""
    with torch.no_grad():
        for name, piece in model.named_parameters():
            piece.fill_(1.0) if "norm" in name and "weight" in name else piece.normal_(0.0, 0.02)


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Find the most layers with which two ranks stay below their caps (MB).

    The state is divided by memory, and equally.
    """
    split = make_split([3, 1], options)
    caps = [each * 1e6 for each in options.caps]
    found: dict[str, Any] = {}
    for kind in ("by memory", "equal"):
        layers = 2
        while (now := try_layers(split, layers + 1, caps, kind == "equal", options)) is not None:
            layers, found[kind] = layers + 1, now
    beside = found["by memory"]["beside"]
    room = sum(cap - beside for cap in caps)
    found["of what is left"] = round(found["by memory"]["state"] / room, 3)
    found["to equal"] = round(found["by memory"]["state"] / found["equal"]["state"], 3)
    return found


def try_layers(
    split: Split, layers: int, caps: list[float], equal: bool, options: Any
) -> dict[str, Any] | None:
    """Return the measurements of a model that fits; None if it doesn't."""
    torch.manual_seed(0)
    beside = expect(Decoder(options.width, layers), options, None)
    parts = [1.0, 1.0] if equal else [max(1.0, cap - beside) for cap in caps]
    way = shards(
        split,
        argparse.Namespace(width=options.width, layers=layers, units=options.units),
        (3, 1),
        parts,
        None,
    )
    for _ in range(2):
        way.step()
    peak = torch.zeros(len(caps))
    peak[split.rank] = way.model.exchange.ledger.peak
    dist.all_reduce(peak)
    if any(own > cap for own, cap in zip(peak.tolist(), caps, strict=True)):
        return None
    state = STATE_BYTES * sum(slot.numel for slot in way.model.exchange.slots)
    expected = [beside + part / sum(parts) * state for part in parts]
    ratios = [round(own / its, 4) for own, its in zip(peak.tolist(), expected, strict=True)]
    return {
        "layers": layers,
        "state": state,
        "beside": beside,
        "peaks": peak.tolist(),
        "to expected": ratios,
    }


def exact(options: argparse.Namespace) -> dict[str, Any]:
    """Compare float64 weights with those of one process.

    Rows are divided 3:1 and the state 1:3; later the run continues from a checkpoint with the
    opposite division of the state.
    """
    world = options.ranks
    rows, parts = [3, *[1] * (world - 1)], [1.0, *[3.0] * (world - 1)]
    split = make_split(rows, options)
    torch.manual_seed(1)
    words = torch.randint(0, WORDS, (6, sum(rows), 16)).to(split.device)
    first = sum(rows[: split.rank])
    reference = Decoder(64, 4).double().to(split.device)
    plain = torch.optim.AdamW(reference.parameters(), 1e-2, eps=EPS)
    model = split.shard(Decoder(64, 4).double(), state=parts, units=options.units)
    update = torch.optim.AdamW(model.parameters(), 1e-2, eps=EPS)
    for number, batch in enumerate(words):
        if number == 3:
            split.save(options.folder, model, update, {"step": number})
            model = split.shard(Decoder(64, 4).double(), state=parts[::-1], units=options.units)
            update = torch.optim.AdamW(model.parameters(), 5.0)
            assert split.load(options.folder, model, update) == {"step": 3}
        split.begin(rows)
        for net, own, rows_ in (
            (reference, plain, batch),
            (model, update, batch[first : first + rows[split.rank]]),
        ):
            nn.functional.cross_entropy(net(rows_).flatten(0, 1), rows_.flatten()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            own.step()
            own.zero_grad()
    state, expected = split.model_state(model), reference.state_dict()
    return {
        "differs": max(
            (float((state[name] - expected[name].cpu()).abs().max()) for name in state), default=0.0
        )
    }


def abort(options: argparse.Namespace) -> dict[str, Any]:
    """Train until the last rank runs out of memory in a unit's forward pass."""
    split = make_split([1] * options.ranks, options)
    way = shards(split, options, (1,) * options.ranks, (1.0,) * options.ranks, None)
    if split.rank == options.ranks - 1:
        calls: list[int] = []

        def run_out(*_: Any) -> None:
            calls.append(1)
            if len(calls) == WARM_UP * options.layers:
                torch.empty(1 << 50, dtype=torch.uint8, device=split.device)

        for layer in way.model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.register_forward_hook(run_out)
    return {"losses": [way.step() for _ in range(3 * WARM_UP)]}


RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "step": steps,
    "fit": fit,
    "sweep": sweep,
    "exact": exact,
    "abort": abort,
}


def main() -> None:
    """Start the ranks and show their output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU, over gloo")
    parser.add_argument("--width", type=int, default=1024 if GPU else 64)
    parser.add_argument("--layers", type=int, default=16 if GPU else 6)
    parser.add_argument("--rows", type=int, default=16 if GPU else 8, help="of each rank")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--caps", type=float, nargs="+", default=[24, 8])
    parser.add_argument(
        "--beside", type=float, default=1.0, help="GiB of each cap that isn't for state"
    )
    parser.add_argument("--params", type=float, default=1.6e9 if GPU else 1e6)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.units = nn.TransformerEncoderLayer if options.run == "step" else None
    if options.rank:
        if not GPU:
            torch.set_num_threads(1)
        found = RUNS[options.run](options)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
        dist.destroy_process_group()
        return
    more = {"CUDA_VISIBLE_DEVICES": "0"} if options.one_gpu else None
    ranks = start("benchmarks.shards", options.ranks, *sys.argv[1:], "--rank", more=more)
    while None in [each.poll() for each in ranks] and not any(each.poll() for each in ranks):
        time.sleep(0.1)
    began = time.monotonic()
    if options.run == "abort":
        while None in [each.poll() for each in ranks] and time.monotonic() < began + 60:
            time.sleep(0.1)
        print(
            f"{time.monotonic() - began:.1f} s after the first, exit codes "
            f"{[each.poll() for each in ranks]}"
        )
    for each in ranks:
        if any(other.poll() for other in ranks):
            # over NCCL it would wait for the one that failed; torchrun and evener launch end it too
            each.kill()
    printed = [each.communicate()[0] for each in ranks]
    sys.stdout.write("".join(printed))
    sys.exit(max(each.returncode for each in ranks))


if __name__ == "__main__":
    main()
