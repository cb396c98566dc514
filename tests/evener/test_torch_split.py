"""What a training script sees of a split: rank, early errors, rows, half precision."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

import evener.torch
from evener.errors import DeviceError, EvenerError, PlanError, RequestError
from evener.live import reporter as live
from evener.plan.file import Fingerprint, Plan, Share, make_layout
from evener.system.cores import slice_cores
from evener.torch import Split
from evener.torch.ranks import own_work
from evener.torch.ranks.own_work import StepReporter
from evener.torch.ranks.peers import leave_group
from evener.torch.ranks.ranks import ProcessRank, choose_device
from evener.torch.step.wrapped import model_digest, wrap_module
from evener.torch.sums import buckets
from evener.torch.sums.exchange import Exchange, own_hooks
from tests.support.launched_plan import make_plan

ROWS = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(20, 1))


def plan(
    batches: tuple[int, ...], device: str = "cpu-{}-of-2", kind: str = "", **changes: Any
) -> Plan:
    devices = tuple(Share(device.format(i), i, "a device", 0, 0.0) for i in range(len(batches)))
    chosen: Any = kind or ("split" if sum(map(bool, batches)) > 1 else "solo")
    return make_plan(make_layout(chosen, devices, batches), **changes)


@pytest.fixture(autouse=True)
def surroundings(alone_on_the_cpu: None) -> Any:
    """Restore the CPU's state."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def test_the_last_reference_to_a_group_that_was_left_is_not_a_models() -> None:
    """A model that held it would destroy the group when it is deleted after `close`.

    That waits for a thread that needs the GIL.
    """
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    group = weakref.ref(torch.distributed.group.WORLD)
    leave_group()
    gc.collect()
    assert group() is not None
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_a_buffer_of_any_type_is_seen_to_change(dtype: torch.dtype) -> None:
    """A change of the last element is seen in any memory format.

    Non-numeric or ignored buffers don't count.
    """
    module, flag = torch.nn.Sequential(torch.nn.Identity()), torch.zeros(1)
    for name, buffer in {
        "no_number": torch.tensor(torch.nan),
        "empty": torch.zeros(0, 3),
        "other": torch.zeros(4, 3, 2, dtype=dtype).permute(1, 2, 0)[1:],
        "left": torch.zeros(()),
    }.items():
        module[0].register_buffer(name, buffer)
    seen = buckets.Buffers(module, {"0.left"})
    assert seen.keep()
    module[0].left.data.add_(1)
    seen.flag_changes(flag)
    assert flag.item() == 0
    module[0].other.data[1, 1, 3] = 1
    seen.flag_changes(flag)
    assert flag.item() == 1


def test_one_device_needs_no_group(tmp_path: Path) -> None:
    """Plain python trains a plan for one device like a plain loop.

    The model is unchanged, and every row is used.
    """
    plan((0, 8)).save(tmp_path / "plan.toml")
    split = Split(tmp_path / "plan.toml")
    model = torch.nn.Linear(1, 1)
    assert repr(split) == "Split(shares=(8,), rank=0, device=cpu, weigh='gradients')"
    assert (split.rank, split.world, split.shares, split.device) == (
        0,
        1,
        (8,),
        torch.device("cpu"),
    )
    assert split.wrap(model) is model
    assert sorted(float(row) for (rows,) in split.loader(ROWS) for row in rows) == [
        float(i) for i in range(20)
    ]
    with split.no_sync(model):
        assert split.mean(torch.tensor(3.0, requires_grad=True)) == split.total(3.0) == 3.0
    assert split.total(torch.tensor([[1, 2]])).tolist() == [[1, 2]]
    assert split.gather(ROWS.tensors[0]) is ROWS.tensors[0]
    assert not torch.distributed.is_initialized()


def test_a_slice_of_the_cpu_is_where_it_was_measured() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    Split(plan((0, 8)))
    assert os.sched_getaffinity(0) == set(slice_cores("cpu-1-of-2", allowed))
    assert os.sched_getaffinity(0) != allowed


GPUS = {"GPU-a": 0, "GPU-b": 1}


@pytest.mark.parametrize(
    ("device", "local_rank", "gpus", "expected"),
    [
        ("GPU-b", 0, GPUS, "cuda:1"),
        ("GPU-a", 1, GPUS, "cuda:0"),
        ("GPU-elsewhere", 1, GPUS, "cuda:1"),
        ("GPU-b", 1, {"GPU-b": 0}, "cuda:0"),
        ("cpu-1-of-2", 1, GPUS, "cpu"),
        ("sim-0-p100", 1, GPUS, "cuda:1"),
        ("sim-0-p100", 0, {}, "cpu"),
        (None, 1, GPUS, "cuda:1"),
        (None, 1, {}, "cpu"),
    ],
)
def test_a_rank_gets_its_plans_device(
    device: str | None, local_rank: int, gpus: dict[str, int], expected: str
) -> None:
    """The device is found by its UUID if it is here, else by the local rank."""
    share = None if device is None else Share(device, 0, "a device", 4, 0.5)
    assert str(choose_device(share, ProcessRank(local_rank, 2, local_rank), gpus)) == expected


@pytest.mark.parametrize("device", ["GPU-b", "MIG-b"])
def test_a_missing_gpu_is_a_one_line_error(device: str) -> None:
    with pytest.raises(DeviceError, match=device) as caught:
        choose_device(Share(device, 0, "a device", 4, 0.5), ProcessRank(1, 2, 1), {"GPU-a": 0})
    assert caught.value.remedy


def test_another_global_batch_keeps_the_ratios() -> None:
    assert Split(plan((0, 8)), global_batch=32).shares == (32,)
    with pytest.raises(RequestError, match="0 samples"):
        Split(plan((0, 8)), global_batch=0)


@pytest.mark.parametrize(
    ("world", "batches", "named"),
    [
        ("1", (6, 2), "has 1"),
        ("3", (6, 2), "has 3"),
        ("2", (8, 0), "has 2"),
        ("3", (5, 0, 1), "1 of its devices"),
    ],
)
def test_a_wrong_world_is_refused_before_anyone_waits(
    monkeypatch: pytest.MonkeyPatch, world: str, batches: tuple[int, ...], named: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PlanError, match=named) as caught:
        Split(plan(batches))
    assert f"Start {sum(map(bool, batches))}, as" in caught.value.remedy


def test_no_torchrun_at_all_is_the_same_error() -> None:
    with pytest.raises(PlanError, match="has 1"):
        Split(plan((6, 2)))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"global_batch": 8, "ratios": [3, 1]},
        {"global_batch": 8, "ratios": [0]},
        {"global_batch": 8, "ratios": [float("nan")]},
        {"global_batch": 8, "ratios": [-1.0]},
        {"global_batch": 8, "ratios": []},
        {"global_batch": 0},
        {"global_batch": 8.5},
        {"ratios": [1]},
        {"plan": "no such.toml"},
        {"plan": plan((0, 8)), "ratios": [1]},
        {"plan": plan((8, 8), kind="place")},
        {"plan": plan((0, 8)), "weigh": "sometimes"},
    ],
    ids=str,
)
def test_what_cannot_be_split_is_a_one_line_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(EvenerError) as caught:
        Split(**arguments)
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_an_incomplete_environment_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, "two")
    with pytest.raises(PlanError, match=name):
        Split(plan((6, 2)))


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "nothing sets RANK"),
        ({"RANK": "2"}, "no rank 2 among WORLD_SIZE=2"),
        ({"RANK": "1"}, "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_what_torchrun_would_have_set_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=named) as caught:
        Split(plan((6, 2)))
    assert "torchrun" in caught.value.remedy


def test_a_validation_inside_a_step_leaves_the_steps_rows_and_weights() -> None:
    """A finished or interrupted validation doesn't affect the step, even within a batch of it."""
    split = Split(plan((0, 8)))
    for _ in split.loader(ROWS, shuffle=False):
        rows, held_out = split.rows, split.loader(ROWS, shuffle=False, training=False)
        assert [split.rows for _ in held_out] == [8, 8, 4]
        assert split.rows == rows
        for _ in held_out:
            break
        assert split.rows == rows
    with pytest.raises(RequestError, match="no current batch"):
        _ = split.rows


def test_a_plan_of_other_devices_or_another_framework_warns_and_strict_refuses() -> None:
    for odd, named in (
        (plan((8,), "GPU-{}"), "GPU-0"),
        (plan((8,), framework="tensorflow"), "tensorflow"),
    ):
        made: list[Any] = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made.append(Split(odd))
            except EvenerError as error:  # a plan for a GPU can't train without one
                made.append(error)
        assert any(named in str(warning.message) for warning in said)
        with pytest.raises(PlanError, match=named):
            Split(odd, strict=True)


def test_another_model_warns_and_strict_refuses() -> None:
    model = torch.nn.Linear(3, 2)
    measured = plan((0, 8), fingerprint=Fingerprint((), "", {}, model_digest(model)))
    assert Split(measured, strict=True).wrap(model) is model
    with pytest.warns(UserWarning, match="another model"):
        Split(measured).wrap(torch.nn.Linear(3, 4))
    with pytest.raises(PlanError, match="another model"):
        Split(measured, strict=True).wrap(torch.nn.Linear(3, 4))


def limited(batches: tuple[int, ...]) -> Plan:
    """Return a plan whose devices all were limited to 60 %."""
    made = plan(batches)
    shares = tuple(msgspec.structs.replace(share, limit="60%") for share in made.layout.share)
    return msgspec.structs.replace(made, layout=msgspec.structs.replace(made.layout, share=shares))


def test_limits_that_do_not_hold_here_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank prints one sentence for all devices."""
    for name in ("join", "watch_peers"):
        monkeypatch.setattr(f"evener.torch.planned.{name}", Mock())
    monkeypatch.setattr(
        "evener.torch.ranks.ranks.gather_infos", lambda own, process: [own] * process.world
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Split(limited((6, 2)))
        assert len(said) == expected
        assert all(str(warning.message).count("60%") == 2 for warning in said)


def test_scaling_a_loss_that_is_weighted_already_is_refused() -> None:
    with pytest.raises(RequestError, match="weighted already"):
        Split(plan((0, 8))).scale(torch.tensor(1.0))


def test_training_is_reported_and_validation_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(plan((0, 8)))
    reported: list[tuple[int, str]] = []

    def note(rows: int, **words: Any) -> None:
        reported.append((rows, words["devices"][0].device))

    monkeypatch.setattr(live.Reporter, "report", lambda _, rows, **words: note(rows, **words))
    for _ in split.loader(ROWS, training=False):
        pass
    assert reported == []
    for _ in split.loader(ROWS):
        pass
    assert reported == [(8, "cpu-1-of-2"), (8, "cpu-1-of-2"), (4, "cpu-1-of-2")]


def test_a_validation_takes_as_long_as_all_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader and the model's forward pass both show each batch, which is one batch."""
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: now)
    monkeypatch.setattr(own_work, "time", clock)
    monkeypatch.setattr(own_work.HostClock, "mark", staticmethod(clock.perf_counter))
    monkeypatch.setattr(StepReporter, "report", lambda *_: None)
    split = Split(plan((0, 8)))
    model = split.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(8):
        for (inputs,) in split.loader(ROWS):
            model(inputs).sum().backward()
            now += 1
            optimizer.step()
        with torch.no_grad():
            for (inputs,) in split.loader(ROWS, training=False):
                model(inputs)
                now += 2
    split.timer.last()
    sums = split.timer.sums.whole
    assert sums.validation_s == 7 * 3 * 2, "all but the last one, which no step follows"
    assert sums.between_s == 0


def test_a_split_that_is_dropped_leaves_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.0)
    split = Split(plan((0, 8)))
    for _ in range(3):
        split.report(8)
    assert len(list(tmp_path.glob("live/*"))) == 1
    del split
    assert list(tmp_path.glob("live/*")) == []


def test_weights_of_a_rank_without_rows_keep_infinities_out() -> None:
    """A filler row may overflow without affecting others, also when gradients accumulate."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    split = Split(plan((0, 8)))
    model = wrap_module(torch.nn.Linear(2, 1, bias=False), split.device)
    exchange, weight = model.exchange, model.module.weight
    assert exchange is not None
    with model.no_sync():
        exchange.weigh(0.5)
        model(torch.ones(1, 2)).sum().backward()
    exchange.weigh(0.0)
    model(torch.tensor([[float("inf"), 1.0]])).sum().backward()
    assert weight.grad.tolist() == [[0.5, 0.5]]
    weight.grad = None
    exchange.weigh(0.75)
    model(torch.full((1, 2), 2.0)).sum().backward()
    assert weight.grad.tolist() == [[1.5, 1.5]]
    leave_group()


def test_hooks_that_are_gone_are_forgotten() -> None:
    """A model whose outputs are hidden gets new parameter hooks in each forward pass."""
    before = len(own_hooks)
    exchange = Exchange(torch.nn.Linear(2, 2), single_rank=True)
    known = []
    for _ in range(3):
        exchange.watch([], True)
        known.append(len(own_hooks) - before)
    assert known == [2, 2, 2]
    del exchange
    assert len(own_hooks) == before


@pytest.mark.parametrize("kind", ["before", "after", "none"])
def test_hooks_on_gradients_are_warned_of(kind: str) -> None:
    """A clamping hook gets this rank's gradient, but is exact only on the whole batch's."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    model = wrap_module(torch.nn.Linear(2, 1), torch.device("cpu"))

    def clamp(weight: Any) -> None:
        weight.grad.clamp_(-1, 1)

    if kind == "before":
        model.module.bias.register_hook(lambda gradient: gradient.clamp(-1, 1))
    elif kind == "after":
        model.module.bias.register_post_accumulate_grad_hook(clamp)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
    said = [str(each.message) for each in seen if "hook on its gradient" in str(each.message)]
    assert len(said) == (kind != "none"), said
    leave_group()


SCRIPT = """
import argparse, warnings
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from evener.torch import Split

parser = argparse.ArgumentParser()
parser.add_argument("--plan")
parser.add_argument("--out")
options = parser.parse_args()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(203, 6), torch.randint(0, 3, (203,)))


def train(half, plan=options.plan):
    split = Split(plan)
    loader = split.loader(data, seed=1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model = split.wrap(net, device_ids=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=half == torch.float16)
    seen, losses = [], []
    for epoch in range(3):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            mean = 0.0
            for part in split.parts(batch):
                inputs, labels = part.batch
                with torch.autocast("cpu", half, enabled=half is not None):
                    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                if epoch == 1 and step == 3 and split.rank == 1 and half == torch.float16:
                    loss = loss * float("inf")
                mean += part.backward(scaler.scale(loss)) / scaler.get_scale()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(split.mean(mean))
            if epoch == 0:
                seen += batch[0][: split.rows, 0].tolist()
    return {"seen": seen, "losses": losses, "scale": scaler.get_scale(), "rows": data.tensors[0][:, 0].tolist(),
            "weights": [weight.detach() for weight in net.parameters()]}


def wrong(*layers, hook=False):
    warnings.simplefilter("error")
    split = Split(options.plan)
    try:
        model = split.wrap(torch.nn.Sequential(torch.nn.Linear(6, 3), *layers))
        if hook:
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 3))
            model.register_comm_hook(None, allreduce_hook)  # which must stay: wrap then refuses the model
            split.wrap(model)
    except Exception as error:
        return str(error)


def wrong_in_one_backward_pass():
    split, trunk = Split(options.plan), torch.nn.Linear(6, 3)
    first, second = (split.wrap(torch.nn.Sequential(trunk, torch.nn.Linear(3, 1))) for _ in range(2))
    rows = torch.ones(2, 6)
    split.begin([2, 2])
    try:
        first(rows).sum().backward()
        second(rows).sum().backward()
        (first(rows) + second(rows)).sum().backward()
    except Exception as error:
        return str(error)


ended = {name: train(half) for name, half in
         {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}.items()}
ended["float16 in passes"] = train(torch.float16, "passes.toml")
ended["normalize"] = wrong(torch.nn.BatchNorm1d(3))
ended["synchronize"] = wrong(torch.nn.SyncBatchNorm(3))
ended["hook"] = wrong(hook=True)
ended["in common"] = wrong_in_one_backward_pass()
torch.save(ended, f"{options.out}{Split(options.plan).rank}.pt")
"""  # noqa: E501


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, trainer_ranks: Callable[..., list[Any]]
) -> list[dict[str, Any]]:
    """Return the results of two ranks for the script above."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    made = plan((24, 8))
    made.save(folder / "plan.toml")
    layout = make_layout("split", made.layout.share, (24, 8), micros=(9, 4))
    msgspec.structs.replace(made, layout=layout).save(folder / "passes.toml")
    words = ["--plan", "plan.toml", "--out", "rank"]
    trainer_ranks(
        "tests.support.script_ranks.save_printed", str(folder / "train.py"), *words, world=2
    )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_every_row_is_trained_once(ended: list[dict[str, Any]]) -> None:
    first, second = (rank["float32"] for rank in ended)
    assert sorted(first["seen"] + second["seen"]) == sorted(first["rows"])
    assert 2.5 < len(first["seen"]) / len(second["seen"]) < 3.5
    assert first["losses"] == second["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float16", "float16 in passes"])
def test_every_precision_keeps_the_ranks_equal_and_near_float32(
    ended: list[dict[str, Any]], mode: str
) -> None:
    for first, second in zip(ended[0][mode]["weights"], ended[1][mode]["weights"], strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)
    assert ended[0][mode]["losses"][:7] == pytest.approx(
        ended[0]["float32"]["losses"][:7], abs=0.03
    )


@pytest.mark.slow
def test_an_overflow_on_one_rank_is_skipped_by_both(ended: list[dict[str, Any]]) -> None:
    """Both ranks halve the loss scale once and continue, also in passes."""
    for mode in ("float16", "float16 in passes"):
        assert ended[0][mode]["scale"] == ended[1][mode]["scale"] == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("normalize", "normalizes over each device"),
        ("normalize", "drop_last=True"),
        ("synchronize", "weigh='loss'"),
        ("hook", "communication hook"),
        ("in common", "have a layer in common"),
    ],
)
def test_what_would_not_be_exact_is_warned_of(
    ended: list[dict[str, Any]], mode: str, named: str
) -> None:
    assert named in ended[0][mode]


SITS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from threading import Timer
from evener.training import ending
ending.STUCK_SECONDS = 0.5
rank = int(os.fork() == 0)
if rank:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank:
    time.sleep(60)
ending.install_interrupt_watchdog()
Timer(0.5, lambda: print("waits", flush=True)).start()
dist.all_reduce(torch.ones(1))
"""


def test_ctrl_c_ends_a_rank_that_waits_for_one_that_ignores_it(tmp_path: Path) -> None:
    """gloo's wait ignores it, and a launcher would kill the rank after 30 s."""
    command = [sys.executable, "-c", SITS, str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as child:  # type: ignore[call-overload]
        try:
            assert child.stdout.readline() == "waits\n"
            os.killpg(child.pid, signal.SIGINT)
            assert child.wait(30) == 130
        finally:
            os.killpg(child.pid, signal.SIGKILL)
        assert "a call didn't come back for 0.5 s after Ctrl-C" in child.stderr.read()


def test_every_name_that_is_offered_is_there() -> None:
    for name in evener.torch.__all__:
        assert getattr(evener.torch, name).__name__ == name


BESIDE_OTHERS = """
import gc, signal, sys
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def read_process():
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    hooks += modules._global_module_registration_hooks, modules._global_buffer_registration_hooks
    return *map(len, hooks), sys.excepthook, signal.getsignal(signal.SIGINT)

before = read_process()
import evener.torch.planned, evener.torch.shards.make
from evener.torch import Split
assert read_process() == before, "on import"

def train(closes):
    split = Split(global_batch=2)
    model = split.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    for batch in split.loader(torch.ones(4, 1)):
        split.step(batch, lambda part: model(part.batch).sum() / max(1, part.rows))
        optimizer.step()
    during = read_process()
    assert during[:2] > before[:2] and during[4:] == before[4:], during
    if closes:
        split.close()
        assert read_process()[:2] == before[:2], "closed"

for closes in (False, True):
    train(closes)
    gc.collect()
    assert read_process() == before, "gone"
print("as it was")
"""


def test_what_it_changes_in_the_process_goes_with_it() -> None:
    """Importing changes nothing, and later changes are undone, for the sake of other libraries.

    They are undone when a split is closed, and when it is no longer referenced.
    """
    environment = {**os.environ, "WORLD_SIZE": "1", "RANK": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", BESIDE_OTHERS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.stdout, ended.returncode) == ("as it was\n", 0), ended.stderr


REFUSED_FIRST = """
import os, signal, socket
from threading import Thread
from evener.training import ending
hears = signal.getsignal(signal.SIGINT)
thread = Thread(target=ending.install_interrupt_watchdog)
thread.start()
thread.join()
other, _ = socket.socketpair()
other.setblocking(False)
signal.set_wakeup_fd(other.fileno())
opened = len(os.listdir("/proc/self/fd"))
ending.install_interrupt_watchdog()
assert len(os.listdir("/proc/self/fd")) == opened
assert signal.set_wakeup_fd(-1) == other.fileno()
assert signal.getsignal(signal.SIGINT) is hears
ending.install_interrupt_watchdog()
assert signal.getsignal(signal.SIGINT) is not hears
print("listens")
"""


def test_ctrl_c_is_heard_after_calls_that_could_not_listen() -> None:
    """The earlier calls were off the main thread, or while another library handled Ctrl-C."""
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED_FIRST], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("listens\n", 0), ended.stderr


HANDLES = """
import os, signal, time
from evener.training import ending
ending.STUCK_SECONDS = 0.3
ending.install_interrupt_watchdog()
before = signal.signal(signal.SIGINT, lambda *_: print("saves a checkpoint", flush=True))
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
signal.signal(signal.SIGINT, before)
time.sleep(0.6)
print("goes on")
"""


def test_ctrl_c_that_another_handler_takes_ends_nothing() -> None:
    """The handler is Ray's, or the program's own for some time."""
    ended = subprocess.run(
        [sys.executable, "-c", HANDLES], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout.splitlines(), ended.returncode) == (["saves a checkpoint", "goes on"], 0)


@pytest.mark.parametrize("add", ["buffer", "module"])
def test_the_first_buffer_of_a_model_is_seen_as_it_comes(add: str) -> None:
    model, flag, late = (
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        torch.zeros(1),
        torch.nn.BatchNorm1d(2),
    )
    found = buckets.Buffers(model)
    found.keep()
    found.flag_changes(flag)
    assert not flag
    model.append(late) if add == "module" else model.register_buffer("late", torch.ones(1))
    found.flag_changes(flag)
    assert flag
