"""Workloads made of a PyTorch module, an optimizer, a loss and training data.

Steps are the same as in the user's training. On one device, they are a plain loop. On several
devices, each device has a process, and the processes all-reduce gradients as in `evener.torch`. If
the parts of a model are placed on several devices, one process drives them all. Batches come from
host memory, unless the setup says otherwise.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch._dynamo  # optimizers import it in their first step, which may be under a memory cap
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from evener.errors import RequestError
from evener.shares.curves import Cost, RankCost, Work
from evener.shares.whole_rows import count_passes, gradient_weight, split_passes
from evener.torch.ranks.own_work import GpuClock, make_clock
from evener.torch.ranks.ranks import fetching_threads
from evener.torch.rows.loader import StepListener
from evener.torch.rows.sampler import UnevenBatchSampler
from evener.torch.rows.structure import AssignedBatch
from evener.torch.step.part import make_parts
from evener.torch.step.recovery import free_memory
from evener.torch.step.step import Passes
from evener.torch.step.wrapped import Exchanged, check_normalization, model_digest, wrap_module
from evener.torch.stores import open_file_store, open_tcp_store
from evener.torch.sums.exchange import Exchange
from evener.torch.sums.link import measure_sums
from evener.training.row_assignment import RowAssigner

from ..protocol import LEFT_BYTES, LinkSpeed, MemoryMeter, PhaseSeconds, WorkerSetup, Workload
from .batches import Batches, Data, Pool, SampleBatch, as_pair
from .phases import PhaseClock, enqueue_pause
from .shards import RecipeShards, leave_trainers_on_host

MEETING_TIME = timedelta(seconds=300)  # timeout for the rendezvous of a group's ranks
NOTED_STEPS = 2  # the optimizer creates its state in the first step
_HALVES = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}


class Recipe(msgspec.Struct, frozen=True):
    """What a workload is created from: a module with its optimizer, loss and data.

    The module is on the CPU at first. The workload moves it to its device.
    """

    module: Any  # torch.nn.Module
    optimizer: Any  # has the module's parameters
    loss: (
        Callable[..., Any] | None
    )  # (outputs, targets) -> mean over the rows; None: the module returns its loss
    data: Data | None = None  # training data; None: rows that `sample_batch` makes
    sample_batch: SampleBatch | None = None
    mixed_precision: str = ""  # a Trainer's mixed precision as accelerate's value: no | fp16 | bf16
    autocast_dtype: Any = None  # dtype of an autocast around the module's forward pass, if known
    accumulates: bool = False  # gradients of several batches are accumulated before a step
    # called once before any sharding, with True if the model will be sharded
    prepare: Callable[[bool], None] = lambda _: None


class Waits:
    """Measures how long a GPU waits for the gradients of other ranks.

    A wait begins when the GPU's own last gradient is ready, and ends with the all-reduce.
    """

    def __init__(self, exchange: Exchange, clock: Any) -> None:
        self._clock = clock
        self._ready: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        exchange.ready, exchange.done = self._note_ready, self._note_done

    def _note_ready(self) -> None:
        self._ready = self._clock.mark()

    def _note_done(self) -> None:
        self._pairs.append((self._ready, self._clock.mark()))

    def read(self) -> float:
        """Return how many seconds were spent on exchanging gradients since the previous call.

        The device must have finished the steps.
        """
        pairs, self._pairs = self._pairs, []
        waited: float = sum(self._clock.seconds(*pair) for pair in pairs)
        self._clock.reuse([mark for pair in pairs for mark in pair])
        return waited


DrawRows = Callable[
    [Data, Sequence[int], int], UnevenBatchSampler
]  # (data, rows of every rank, this rank)
BuildRecipe = Callable[[], Recipe]
PlaceParts = Callable[
    [Any, tuple[torch.device, ...]], Any
]  # puts a module's parts on devices and returns the module to call


class TorchWorkload(Workload, StepListener):
    """A PyTorch model that a probe trains.

    The model is trained on one device, by a rank of a group, in shards over the ranks of a group,
    or with its parts on several devices. `place` puts these parts on the devices. Raises
    `RequestError` for a setup that isn't supported.
    """

    def __init__(
        self, setup: WorkerSetup, build_recipe: BuildRecipe, place: PlaceParts | None = None
    ) -> None:
        check_setup(setup, placed=place is not None)
        self.setup = setup
        self.devices = configure(setup)
        self.device = self.devices[0]
        self.memory = (
            GpuMemory(self.devices) if _on_gpu(self.device) else MemoryMeter(len(self.devices))
        )
        self._group = join(setup, self.device)
        torch.manual_seed(0)  # every rank starts with the same weights
        if setup.state:
            leave_trainers_on_host()
        self.recipe = build_recipe()
        self.recipe.prepare(bool(setup.state))
        module = self.recipe.module.train()
        self._known = {
            "parameters": sum(map(torch.numel, module.parameters())),
            "digest": model_digest(module),
            "parameter_bytes": sum(parameter.nbytes for parameter in module.parameters()),
            "gradient_bytes": sum(
                parameter.nbytes for parameter in module.parameters() if parameter.requires_grad
            ),
        }
        self._shards = RecipeShards(self.recipe, setup, self.device) if setup.state else None
        if self._shards is None:
            module.to(self.device)
        self._equal_passes = 0  # number of passes of every rank; 0: each rank has its own number
        self._batches: Batches | None = None
        self._loss: Any = None
        self._scaler = torch.amp.GradScaler(
            self.device.type, enabled=setup.precision == "mixed_float16"
        )
        self._members: tuple[int, ...] = ()
        self._micro = 0  # the maximum rows per pass
        self._passes = Passes(setup.rank, self.device, lambda _: None)
        self._steps = 0  # number of steps since `prepare`
        # the error of a group's step that ran out of memory and was completed in smaller passes
        self._short_of_memory = ""
        self._is_updating = False  # the optimizer's step is running
        # bytes allocated as a step began, and the number of steps recorded since `prepare`
        self._held = self._noted = 0
        self._work = Work(0.0, 0.0, 0.0, 0.0)
        self._waits: Waits | None = None
        self._phases = PhaseClock(make_clock(self.device))
        self._assignments: Counter[RowAssigner] = Counter()  # number of uses of each assigner
        self._model: Any = (
            self.recipe.module if place is None else place(self.recipe.module, self.devices)
        )

    def prepare(self, shares: Sequence[int], micro: Sequence[int] = ()) -> None:
        """Prepare steps with these shares and passes; see `Workload.prepare`.

        A rank with a share of 0 leaves the group until a later call. If the model is sharded, the
        rank stays instead and computes one filler row, which has weight 0.
        """
        self._micro = own_share(self.setup, micro or shares)
        if micro:
            passes = (
                rows
                for each in zip(shares, micro, strict=True)
                if each[0]
                for rows in split_passes(*each)
            )
            check_normalization(self.recipe.module, "gradients", sum(map(bool, shares)), passes)
        if self._shards is not None:
            computing = [each for each in zip(shares, micro or shares, strict=True) if each[0]]
            self._equal_passes = max(count_passes(*each) for each in computing)
            if not self._micro:
                self._micro = 1
                self._shards.compute_nothing()
        on_host = self._micro < own_share(self.setup, shares) or self._equal_passes > 1
        self._prepare(shares, lambda data, sizes, rank: data.sampler(sizes, rank), on_host)

    def prepare_assigned(
        self, shares: Sequence[int], costs: Sequence[Cost], tokens: Sequence[int]
    ) -> None:
        """Prepare steps in which rows are assigned to ranks and passes by their lengths.

        See `Workload.prepare_assigned` for the arguments.
        """
        self._micro = sum(shares)
        assigner = RowAssigner(tuple(map(RankCost, costs, tokens)), tuple(map(float, shares)))
        epoch = self._assignments[
            assigner
        ]  # new batches each time, because the framework knows the shapes of earlier batches
        self._assignments[assigner] += 1
        self._prepare(
            shares,
            lambda data, sizes, rank: data.assigned_sampler(sizes, rank, assigner, epoch),
            on_host=True,
        )

    def prepare_length(self, shares: Sequence[int], micro: Sequence[int], length: int) -> None:
        """Prepare steps whose rows have about `length` tokens; see `Workload.prepare_length`."""
        self._micro = own_share(self.setup, micro or shares)
        self._prepare(
            shares,
            lambda data, sizes, rank: data.one_length_sampler(sizes, rank, length),
            on_host=True,
        )

    def _prepare(self, shares: Sequence[int], draw: DrawRows, on_host: bool) -> None:
        own = own_share(self.setup, shares)
        batches = self._open_batches()
        batches.drop()
        self.memory.reset()
        self._noted = self._steps = 0
        if self._group:
            self._regroup(tuple(shares))
        if own:
            sizes = [shares[rank] for rank in self._members] if self._group else [own]
            rank = self._members.index(self.setup.rank) if self._group else 0
            batches.make(draw(batches.data, sizes, rank), on_host)
        elif self._shards is not None:
            batches.make(draw(batches.data, [1], 0), on_host)

    def step(self) -> None:
        """Train for one step, without waiting for the GPU.

        A rank without a share does nothing, unless the model is sharded.
        """
        if self._batches is None or not self._batches.rows:
            return
        self._phases.enter("input")
        batch = self._batches.take()
        self._phases.leave()
        optimizer = self.recipe.optimizer
        optimizer.zero_grad(set_to_none=True)
        self._record_used_bytes()
        passes = 1
        # only in the first step of each size: later steps are timed, and seldom run out of memory
        grouped = self._shards is None and isinstance(self._model, Exchanged)
        survives = grouped and not self._steps
        self._steps += 1
        if not self._batches.on_host and not survives:
            self._scaled_loss(*batch).backward()
        else:
            passes = self._step_in_passes(batch, [self._model.exchange] if survives else [])
        if not optimizer.state and _on_gpu(self.device):
            torch.cuda.empty_cache()  # as in a training before the optimizer creates its state
        self._phases.enter("update")
        self._is_updating = True
        self._scaler.step(optimizer)
        self._scaler.update()
        self._is_updating = False
        self._phases.leave()
        self._count_work(self._batches.works(batch), passes)

    def _step_in_passes(self, batch: Any, exchanges: Sequence[Exchange]) -> int:
        """Compute a batch's gradient in several passes, and return how many there were.

        If a pass runs out of memory on a rank of a group, that rank computes it again in smaller
        passes, because the other ranks wait in the all-reduce. `read_shortage` then returns the
        error.
        """
        assert self._batches is not None
        rows = sum(batch.rows) if isinstance(batch, AssignedBatch) else self._batches.rows
        parts = make_parts(batch, rows, self._micro, lambda loss: loss, self._equal_passes)
        for part in self._passes.take(parts, [self._model], exchanges):
            with part if exchanges else nullcontext():
                part.backward(self._scaled_loss(*as_pair(part.batch)))
            self._short_of_memory = self._short_of_memory or part.error
        return len(parts)

    def read_shortage(self) -> str:
        """Return the error of a step that ran out of memory but was completed anyway, or ""."""
        return self._short_of_memory

    def _count_work(self, works: Sequence[Work], passes: int) -> None:
        """Add a step's tokens and passes to this workload's totals."""
        # A batch is padded as a whole before it is cut into passes, so its padding doesn't depend
        # on the number of passes.
        for work in works:
            whole = msgspec.structs.replace(work, passes=passes / len(works))
            self._work = Work(
                *map(sum, zip(*map(msgspec.structs.astuple, (self._work, whole)), strict=True))
            )

    def _record_used_bytes(self) -> None:
        """Record how much memory is allocated at the start of a step, for the first two steps.

        In later steps it is the same, because the optimizer has created its state by then.
        """
        if self._noted < NOTED_STEPS:
            self._noted += 1
            self._held = self.memory.used_bytes()

    @property
    def is_updating(self) -> bool:
        """Whether the optimizer's step is running, or the last one failed."""
        return self._is_updating

    def recover(self) -> bool:
        """Clean up after a step that ran out of memory, and return whether training can go on.

        Training can't go on if the optimizer's step was interrupted, or if memory remains
        allocated. In a group of ranks, it can go on only if this rank completed the step in smaller
        passes.
        """
        ended = bool(self._short_of_memory)
        if self._is_updating or not self._noted or (self._group and not ended):
            return False
        self._loss, self._short_of_memory = None, ""
        self._passes = Passes(self.setup.rank, self.device, lambda _: None)
        self.recipe.optimizer.zero_grad(set_to_none=True)
        if self._shards is not None:
            self._shards.sharded.reset()
        self._open_batches().drop()
        free_memory(self.device)
        # a completed step may have created the optimizer's state
        return ended or self.memory.used_bytes() <= self._held + LEFT_BYTES

    def work(self) -> Work | None:
        """Return the tokens and passes computed so far, or None if rows have no lengths."""
        return self._work if self._work.passes else None

    def read_waits(self) -> float | None:
        """Return how many seconds were spent on exchanging gradients since the previous call.

        Returns None if that is unknown.
        """
        return None if self._waits is None else self._waits.read()

    def _scaled_loss(self, inputs: Any, targets: Any) -> Any:
        with self._autocast():
            loss = self._objective(inputs, targets)
        self._loss = loss.detach()
        return self._scaler.scale(loss)

    def synchronize(self) -> None:
        """Wait until all devices have finished and the next batches are loaded."""
        for device in self.devices:
            if _on_gpu(device):
                torch.cuda.synchronize(device)
        if self._batches is not None:
            started = time.perf_counter()
            self._batches.wait()
            self._phases.add("input", time.perf_counter() - started)

    def read_phases(self) -> PhaseSeconds:
        """Return how long steps waited for input, and how long the optimizer ran.

        Both cover the time since the previous call.
        """
        seconds = self._phases.read()
        return PhaseSeconds(seconds["input"], seconds["update"])

    def keep_batch(self, keep: bool) -> bool:
        """Reuse the same batch for every step if `keep` is set, else draw new batches again.

        Returns False if that isn't possible.
        """
        if self._batches is None or not self._batches.rows:
            return True  # a rank without rows has no batch to keep
        return self._batches.keep(keep)

    def measure_link(self) -> LinkSpeed | None:
        """Measure the speed of an all-reduce between the ranks.

        Returns None if there is no group.
        """
        if not self._group:
            return None
        members = range(self.setup.world)
        return LinkSpeed(*measure_sums(dist.group.WORLD, self.setup.rank, members, self.device))

    def count_memory_retries(self) -> int:
        """Return how often PyTorch's allocator freed its cache to fulfil a request; 0 on a CPU."""
        memory = self.memory
        return memory.count_retries() if isinstance(memory, GpuMemory) else 0

    def time_on_device(self) -> float | None:
        """Return the seconds that the GPU needs for a step whose kernels are enqueued beforehand.

        To measure this, a pause of the GPU is enqueued first. During the pause, the host enqueues
        the step's kernels. Returns None on a CPU.
        """
        if not _on_gpu(self.device):
            return None
        self.synchronize()
        started = time.perf_counter()
        self.step()
        enqueued = time.perf_counter() - started
        self.synchronize()
        clock = GpuClock(self.device)
        enqueue_pause(2 * enqueued)
        start = clock.mark()
        self.step()
        end = clock.mark()
        self.synchronize()
        return clock.seconds(start, end)

    def loss_is_finite(self) -> bool:
        """Return whether the latest loss is finite or unknown."""
        return self._loss is None or bool(torch.isfinite(self._loss).all())

    def facts(self) -> Mapping[str, str]:
        """Return facts about the model, its data and PyTorch, by name."""
        cuda = (
            {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            if _on_gpu(self.device)
            else {}
        )
        modules = self.recipe.module.modules()
        known = {
            "torch": torch.__version__,
            "engine": "ddp" if self._group else "solo",
            **self._known,
            "state": self._shards.describe() if self._shards is not None else None,
            "rows": self.recipe.data.rows if self.recipe.data is not None else 0,
            "computes": "bfloat16" if self._computes_bfloat16() else None,
            "batch_statistics": next(
                (type(module).__name__ for module in modules if isinstance(module, _BatchNorm)),
                None,
            ),
            "hip": torch.version.hip,  # None except in PyTorch for AMD GPUs
            **cuda,
        }
        data = self.recipe.data
        if data is not None and data.lengths is not None and known["batch_statistics"] is None:
            known["lengths"] = " ".join(
                map(str, data.lengths.sample())
            )  # rows assigned by length allow no batch statistics
            known["longest_row"] = data.lengths.longest_row
        return {key: str(value) for key, value in known.items() if value is not None}

    def _computes_bfloat16(self) -> bool:
        """Return whether the model computes in bfloat16.

        It does if the setup, the recipe's mixed precision or a parameter's dtype says so. An
        autocast in the user's own code isn't recognized.
        """
        # an autocast in the user's own code is known only when the code runs
        return (
            _HALVES.get(self.setup.precision) is torch.bfloat16
            or self.recipe.mixed_precision == "bf16"
            or any(
                parameter.dtype is torch.bfloat16 for parameter in self.recipe.module.parameters()
            )
        )

    def _open_batches(self) -> Batches:
        """Return the batches of the training data, which are opened on the first call."""
        # The first call comes after the memory cap has been set, and before `prepare` resets the
        # peak memory.
        if self._batches is None:
            data = self.recipe.data or Data(
                Pool(cast(SampleBatch, self.recipe.sample_batch), self.device.type)
            )
            if self.setup.loader_workers is not None:
                data.use_workers(self.setup.loader_workers)
            self._batches = Batches(data, self.device, self.setup.input == "device", self)
        return self._batches

    def begin(self, origin: object, sizes: tuple[int, ...], batch: Any) -> None:
        """Weight this rank's gradients by its share of the rows; called at the start of each batch.

        `sizes` are the rows of each rank in the batch. The other arguments aren't used.
        """
        model = self._model
        exchange: Any = model.exchange if isinstance(model, Exchanged) else None
        if self._shards is not None:
            exchange = self._shards.sharded
        if exchange is not None and self._members:
            computes = self.setup.rank in self._members
            own = self._members.index(self.setup.rank) if computes else 0
            exchange.weigh(gradient_weight(sizes, own) if computes else 0.0)

    def _objective(self, inputs: Any, targets: Any) -> Any:
        outputs = call(self._model, inputs)
        return outputs if self.recipe.loss is None else self.recipe.loss(outputs, targets)

    def _autocast(self) -> AbstractContextManager[None]:
        half = _HALVES.get(self.setup.precision)
        kept = self._shards is None  # autocast's cache would keep every gathered unit
        context: AbstractContextManager[None] = (
            torch.autocast(self.device.type, half, cache_enabled=kept) if half else nullcontext()
        )
        return context

    def _regroup(self, shares: tuple[int, ...]) -> None:
        """Make only the ranks with a share above 0 exchange gradients.

        Every rank has to call this. If the set of these ranks has changed, a new process group is
        created, unless the model is sharded.
        """
        members = tuple(rank for rank, share in enumerate(shares) if share)
        if self._shards is not None:
            self._members = members
        elif members != self._members:
            group = dist.new_group(list(members))
            if not set(members) <= set(self._members):
                # a returning rank's optimizer state differs from the other ranks' state
                self.recipe.optimizer.state.clear()
            self._members, self._model, self._waits = members, self.recipe.module, None
            if self.setup.rank in members:
                self._model = wrap_module(self.recipe.module, self.device, {"process_group": group})
                if _on_gpu(self.device):
                    self._waits = Waits(self._model.exchange, GpuClock(self.device))


class GpuMemory(MemoryMeter):
    """Memory of GPUs, as PyTorch's allocator reports it."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        super().__init__(len(gpus))
        self._gpus = gpus

    def reset(self) -> None:
        """Free cached memory, and reset the peak-memory counters."""
        torch.cuda.empty_cache()
        for device in self._gpus:
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> tuple[int | None, ...]:
        """Return each GPU's peak memory in bytes since the last reset."""
        return tuple(int(torch.cuda.max_memory_allocated(device)) for device in self._gpus)

    def count_retries(self) -> int:
        """Return how often PyTorch's allocator freed cached memory to fulfil a request."""
        stats = (torch.cuda.memory_stats(device) for device in self._gpus)
        return sum(int(each.get("num_alloc_retries", 0)) for each in stats)

    def used_bytes(self) -> int:
        """Return the bytes that are allocated now, as a sum over all GPUs."""
        return sum(int(torch.cuda.memory_allocated(device)) for device in self._gpus)

    def release(self) -> tuple[int | None, ...]:
        """Free cached memory, and return the bytes that remain reserved on each GPU."""
        torch.cuda.empty_cache()
        return tuple(int(torch.cuda.memory_reserved(device)) for device in self._gpus)


def check_setup(setup: WorkerSetup, placed: bool = False) -> None:
    """Raise `RequestError` if PyTorch can't train with this setup.

    It can't with XLA, or with several devices in one process unless the model's parts are placed on
    them.
    """
    if setup.xla:
        raise RequestError("PyTorch doesn't train through XLA here.", "Leave --xla out.")
    if len(setup.devices) != 1 and not placed:
        raise RequestError(
            f"PyTorch trains with a process for each device, not with {len(setup.devices)} in one.",
            "Use engine ddp, or a workload that places its parts.",
        )


def configure(setup: WorkerSetup) -> tuple[torch.device, ...]:
    """Set this process's devices, threads and memory limits, and return the devices."""
    devices = tuple(torch_device(name) for name in setup.devices)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    if _on_gpu(devices[0]):
        torch.cuda.set_device(devices[0])
        if setup.threads is None:
            torch.set_num_threads(fetching_threads(setup.world * setup.trainings))
        for device, limit in zip(devices, setup.memory_limit_bytes, strict=False):
            if limit is not None:
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return devices


def torch_device(name: str) -> torch.device:
    """Return the PyTorch device for a name such as "cuda:1" or "CPU:0"."""
    kind, _, number = name.partition(":")
    return torch.device("cpu") if kind.lower() == "cpu" else torch.device(kind, int(number or 0))


def join(setup: WorkerSetup, device: torch.device) -> bool:
    """Join the setup's process group, and return whether there is one.

    The backend is NCCL for GPUs, and Gloo otherwise.
    """
    if setup.world == 1:
        return False
    if setup.peers[0].startswith("/"):
        store = open_file_store(setup.peers[0])
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    else:
        host, _, port = setup.peers[0].rpartition(":")
        store = open_tcp_store(host, int(port), setup.rank == 0, MEETING_TIME)
    backend = "nccl" if _on_gpu(device) else "gloo"
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world)
    return True


def own_share(setup: WorkerSetup, shares: Sequence[int]) -> int:
    """Return the number of rows of this rank in each batch.

    If one process has several devices, that is the whole batch. Raises `RequestError` if the number
    of shares is wrong, if one is negative, or if all are 0.
    """
    if len(setup.devices) > 1:
        return sum(shares)  # the model's parts are on several devices, and process every sample
    expected = setup.world
    if len(shares) != expected or min(shares) < 0 or not any(shares):
        raise RequestError(
            f"The shares {tuple(shares)} are not for {expected} devices.",
            "Give 0 or more for each.",
        )
    return shares[setup.rank] if expected > 1 else shares[0]


def call(model: Any, inputs: Any) -> Any:
    """Call a model with a batch's inputs.

    A mapping is passed as keyword arguments, and a sequence as positional arguments.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _on_gpu(device: torch.device) -> bool:
    return bool(device.type == "cuda")
