"""Trainings of sharded models, and the same in one process.

Ranks hold state in the ratio 1:2:5 and compute rows in the ratio 5:2:1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.utils.checkpoint import checkpoint

from evener.plan.file import make_layout
from evener.torch import Split
from evener.torch.rows.sampler import UnevenBatchSampler
from tests.support.torch_ranks import example_plan

FROZEN = ("words", "blocks", "head", "normal", "rare")  # everything except adapters
# three steps per epoch, whose last batch has 3 rows instead of 8
STEPS, WIDTH, WORDS, ROWS = 4, 8, 11, 19
PARTS = {2: (1.0, 3.0), 3: (1.0, 2.0, 5.0), 4: (1.0, 2.0, 5.0, 1.5)}
SHARES = {2: (6, 2), 3: (5, 2, 1), 4: (4, 2, 1, 1)}


class Block(torch.nn.Module):
    """A residual block of two layers, with an option for each feature that a model may have."""

    def __init__(self, case: ShardCase) -> None:
        super().__init__()
        self.normal = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.unused = torch.nn.Parameter(torch.ones(3)) if case.unused else None
        self.hides, self.first = case.hides, False
        self.shared: Any = torch.nn.Identity()
        self.low = self.high = None
        if case.adapters:
            self.low, self.high = (
                torch.nn.Linear(WIDTH, case.adapters, bias=False),
                torch.nn.Linear(case.adapters, WIDTH, bias=False),
            )
        if case.packed:
            self.up, self.down = PackedLinear(self.up), PackedLinear(self.down)
            # compared with these, adapters are small
            self.rest = torch.nn.Parameter(torch.ones(400))

    def forward(self, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = self.down(torch.nn.functional.gelu(self.up(self.normal(rows))))
        if self.low is not None and self.high is not None:
            hidden = hidden + self.high(self.low(rows))
        rows = rows + scale * self.shared(hidden)
        if self.hides:
            return SimpleNamespace(rows=rows) if self.first else (Rows(rows), 1)
        return rows


@dataclass
class Rows:
    """A dataclass that blocks may return."""

    rows: torch.Tensor


def shown(outputs: Any) -> Any:
    """Return the rows in a block's output."""
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    return getattr(outputs, "rows", outputs)


class Statistics:
    """The scale of each row of a quantized weight."""

    def __init__(self, sizes: torch.Tensor) -> None:
        self.sizes = sizes

    def to(self, device: Any) -> None:
        self.sizes = self.sizes.to(device)


class Packed(torch.nn.Parameter):
    """A frozen weight quantized to bytes, with its statistics, as in 4-bit libraries."""

    quant_state: Statistics
    bnb_quantized: bool


def unpack(weight: Any) -> torch.Tensor:
    """Return the weight of a quantized layer."""
    values: torch.Tensor = weight.data.as_subclass(torch.Tensor).double() - 128
    return values * weight.quant_state.sizes


class PackedProduct(torch.autograd.Function):
    """A product that hides its quantized weight from autograd until the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return rows @ unpack(weight).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ unpack(ctx.weight), None


class PackedLinear(torch.nn.Module):
    """A frozen layer with a quantized weight."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().double()
        sizes = weight.abs().amax(1, keepdim=True) / 127
        packed = (weight / sizes).round().add(128).to(torch.uint8)
        self.weight = Packed(packed, requires_grad=False)
        self.weight.quant_state, self.weight.bnb_quantized = Statistics(sizes), True
        self.bias = layer.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return PackedProduct.apply(rows, self.weight) + self.bias


class Model(torch.nn.Module):
    """A small model of tokens with blocks that may have every feature of ShardCase."""

    def __init__(self, case: ShardCase) -> None:
        super().__init__()
        self.case = case
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(case) for _ in range(3))
        self.recurrent = torch.nn.GRU(WIDTH, WIDTH, batch_first=True) if case.recurrent else None
        self.normal = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        if case.tied:
            self.head.weight = self.words.weight
        if case.tied_blocks:
            self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[0].first = True
        if case.shared:
            layer = torch.nn.Linear(WIDTH, WIDTH)
            for block in self.blocks:
                block.shared = layer
        self.rare = torch.nn.Parameter(torch.ones(WIDTH)) if case.unused else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.inner = torch.tensor(0.0)
        if case.adapters and case.checkpoint:  # like transformers' enable_input_require_grads
            self.words.register_forward_hook(lambda _, __, rows: rows.requires_grad_())

    def forward(self, inputs: torch.Tensor) -> Any:
        rows = self.words(inputs)
        if self.training:
            self.seen += 1
        # only one rank has such a row
        if self.rare is not None and bool((inputs == 0).all(1).any()):
            rows = rows + (inputs == 0).all(1)[:, None, None] * self.rare
        for number in self.case.order:
            if self.case.checkpoint is None:
                rows = shown(self.blocks[number](rows, scale=0.5))
            else:
                rows = checkpoint(self.blocks[number], rows, use_reentrant=self.case.checkpoint)
        if self.recurrent is not None:
            rows = self.recurrent(rows)[0]
        self.inner = (rows**2).mean()
        means = self.normal(rows).mean(1)
        outputs = means @ self.head.weight.T if self.case.reads else self.head(means)
        return {"words": outputs} if self.case.mapping else outputs


class ShardCase(msgspec.Struct, frozen=True):
    """One training."""

    optimizer: str = "adamw"
    clip: float | None = None
    accumulate: int = 1
    micros: tuple[int, ...] = ()  # rows of a pass on each rank: with split.parts
    frozen: tuple[str, ...] = ()  # parameters whose names start with these
    adapters: int = 0  # rank of the adapters; small ones aren't sharded
    packed: bool = False  # the frozen layers of a block are quantized
    tied: bool = False
    tied_blocks: bool = False
    unused: bool = False
    recurrent: bool = False
    order: tuple[int, ...] = (0, 1, 2)  # the order in which blocks compute
    shared: bool = False  # all blocks share a layer
    hides: bool = False  # blocks return a namespace, and a dataclass in a tuple
    # the optimizer is created after a forward pass, and gradients are cleared after each step
    late: bool = False
    fails: bool = False  # a backward pass in between raises an error
    checkpoint: bool | None = None  # of activations: reentrant or not; None: without
    mapping: bool = False
    inner: bool = False  # a loss of a block's output is added
    penalty: float = 0.0
    groups: bool = False  # vectors have no weight decay
    validate: bool = False
    by_loss: bool = False
    units: str = ""
    reads: bool = False  # uses the head's weight without calling the head
    planned: bool = False  # the plan states how state is divided
    level: Any = "all"
    window: bool = False  # batches are accumulated under no_sync
    shares: tuple[int, ...] = ()  # of the ranks, if some have no rows; then with a plan


CASES = {
    "the first rank without rows, clipped, validated": ShardCase(
        shares=(0, 5, 3), planned=True, clip=0.1, unused=True, shared=True, validate=True
    ),
    "a rank without rows, passes, checkpointed": ShardCase(
        "momentum",
        shares=(8, 0),
        planned=True,
        micros=(3, 0),
        checkpoint=False,
        accumulate=2,
        frozen=("words", "blocks.1.up"),
    ),
    "two ranks without rows, adapters, tied": ShardCase(
        shares=(0, 8, 0), planned=True, frozen=FROZEN, adapters=1, tied=True, clip=0.1
    ),
    "a rank without rows, state, accumulated": ShardCase(
        shares=(8, 0), planned=True, level="state", accumulate=2, window=True, hides=True
    ),
    "adamw, clipped": ShardCase(clip=0.1, groups=True, validate=True),
    "momentum, clipped by the largest": ShardCase("momentum", clip=0.01),
    "accumulated, tied": ShardCase("momentum", accumulate=2, tied=True, mapping=True),
    "passes, clipped, by a plan's state": ShardCase(micros=(2, 1, 1, 1), clip=0.1, planned=True),
    "passes, counted, accumulated": ShardCase("momentum", micros=(3, 2, 1, 1), accumulate=2),
    "frozen": ShardCase(frozen=("words", "blocks.0", "blocks.1.up"), clip=0.1),
    "adapters": ShardCase(frozen=("words", "blocks", "head"), adapters=2),
    "adapters, whole, accumulated": ShardCase(
        frozen=FROZEN, adapters=1, accumulate=2, clip=0.1, unused=True, validate=True
    ),
    "adapters, whole, in a window": ShardCase(
        "momentum", frozen=FROZEN, adapters=1, accumulate=2, window=True, checkpoint=True
    ),
    "adapters, packed, in passes": ShardCase(
        frozen=FROZEN, adapters=1, packed=True, micros=(2, 1, 1, 1), accumulate=2, window=True
    ),
    "adapters, packed, checkpointed, failed": ShardCase(
        frozen=FROZEN, adapters=1, packed=True, checkpoint=False, fails=True, clip=0.1
    ),
    "adapters, packed, a penalty": ShardCase(
        "momentum", frozen=FROZEN, adapters=4, packed=True, penalty=1e-2, groups=True
    ),
    "unused, tied over blocks": ShardCase(unused=True, tied_blocks=True, order=(0, 1, 2, 1)),
    "checkpointed": ShardCase(checkpoint=False, clip=0.1),
    "checkpointed, reentrant": ShardCase("momentum", checkpoint=True, order=(0, 1, 2, 1)),
    "an inner loss, a penalty": ShardCase(inner=True, penalty=1e-2, recurrent=True),
    "a block twice in a row": ShardCase("momentum", order=(0, 1, 1, 2), clip=0.1),
    "one block, twice": ShardCase(order=(0, 0)),
    "a layer in all blocks": ShardCase("momentum", shared=True),
    "hidden outputs": ShardCase(hides=True, clip=0.1),
    "cleared late": ShardCase(late=True, clip=0.1),
    "a failed pass": ShardCase("momentum", fails=True, clip=0.1),
    "weighted by loss": ShardCase("momentum", by_loss=True, clip=0.1),
    "units by class": ShardCase("momentum", units="linear"),
    "units by size": ShardCase(units="size"),
    "layers beside blocks": ShardCase(units="layers", clip=0.1),
    "a layer that is read": ShardCase(units="layers", reads=True, clip=0.1, validate=True),
    "state, clipped": ShardCase(level="state", clip=0.1, groups=True, validate=True),
    "state, passes, accumulated, tied": ShardCase(
        "momentum",
        level="state",
        micros=(2, 1, 1, 1),
        accumulate=2,
        window=True,
        tied=True,
        mapping=True,
    ),
    "state, accumulated, unused, validated": ShardCase(
        level="state",
        accumulate=2,
        window=True,
        unused=True,
        tied_blocks=True,
        validate=True,
        clip=0.1,
    ),
    "state, frozen, a penalty": ShardCase(
        level="state", frozen=("words", "blocks.1.up"), penalty=1e-2, accumulate=2, window=True
    ),
    "state, checkpointed, reentrant": ShardCase(
        "momentum", level="state", checkpoint=True, order=(0, 1, 2, 1)
    ),
    "state, cleared late, weighted by loss": ShardCase(
        "momentum", level="state", late=True, by_loss=True, clip=0.1
    ),
    "state, a failed pass": ShardCase(
        level="state", fails=True, shared=True, inner=True, window=True, accumulate=2
    ),
}


def make_model(case: ShardCase) -> Model:
    torch.manual_seed(3)
    model: Model = Model(case).double()
    for name, each in model.named_parameters():
        if each.is_floating_point():
            each.requires_grad_(
                not name.startswith(case.frozen or ("-",)) or "low" in name or "high" in name
            )
    return model


class NamedAdamW(torch.optim.AdamW):
    """A subclass of AdamW in the user's program, which steps like the original."""


def make_optimizer(case: ShardCase, model: Any) -> torch.optim.Optimizer:
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    plain = [each for name, each in named if case.groups and "bias" in name]
    rest = [each for name, each in named if not (case.groups and "bias" in name)]
    groups = [{"params": rest}, *([{"params": plain, "weight_decay": 0.0}] if plain else [])]
    if case.optimizer == "adamw":
        return (NamedAdamW if case.late else torch.optim.AdamW)(groups, 1e-2, weight_decay=0.1)
    return torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=1e-2)


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (ROWS, 5), generator=generator)
    words[10:13] = 0
    return torch.utils.data.TensorDataset(
        words, torch.randint(0, WORDS, (ROWS,), generator=generator)
    )


def objective(case: ShardCase, model: Any, inputs: Any, labels: Any) -> Any:
    outputs = model(inputs)
    outputs = outputs["words"] if case.mapping else outputs
    loss = torch.nn.functional.cross_entropy(outputs, labels)
    if case.inner:
        loss = loss + model.inner
    if case.penalty:
        loss = loss + case.penalty * sum(
            (each**2).sum() for each in model.parameters() if each.requires_grad
        )
    if case.late:
        model.zero_grad()
    return loss


def finish(case: ShardCase, step: int, model: Any, update: torch.optim.Optimizer) -> float:
    norm = 0.0
    if (step + 1) % case.accumulate == 0:
        if case.clip is not None:
            kind = float("inf") if "momentum" in case.optimizer and not case.by_loss else 2.0
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip, kind))
        update.step()
        if not case.late:
            update.zero_grad()
    return norm


def reference(case: ShardCase, global_batch: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights by name and the gradient norms of one process."""
    model = make_model(case)
    update = make_optimizer(case, model)
    norms: list[float] = []
    inputs, labels = data().tensors
    for step, rows in zip(range(STEPS), batches(global_batch), strict=False):
        (objective(case, model, inputs[rows], labels[rows]) / case.accumulate).backward()
        norms.append(finish(case, step, model, update))
    return {name: each.detach() for name, each in model.state_dict().items()}, norms


def batches(global_batch: int) -> Iterator[list[int]]:
    sampler = UnevenBatchSampler(ROWS, [global_batch], 0, seed=2)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        yield from sampler


def make_split(case: ShardCase, shares: Sequence[int]) -> Split:
    plan = example_plan(tuple(shares))
    if case.micros or case.planned:
        held = PARTS[len(shares)] if case.planned else (0.0,) * len(shares)
        devices = tuple(
            msgspec.structs.replace(share, state=part / (sum(held) or 1))
            for share, part in zip(plan.layout.share, held, strict=True)
        )
        kind = "shard" if case.planned else "split"
        layout = make_layout(kind, devices, tuple(shares), micros=case.micros[: len(shares)])
        plan = msgspec.structs.replace(plan, layout=layout)
    return Split(plan, weigh="loss" if case.by_loss else "gradients")


def start(case: ShardCase, world: int) -> tuple[Split, Any]:
    split = make_split(case, case.shares or SHARES[world])
    units: Any = {
        "linear": torch.nn.Linear,
        "layers": (Block, torch.nn.Embedding, torch.nn.Linear),
    }.get(case.units)
    model = make_model(case)
    if case.units == "size":
        model.blocks = torch.nn.Sequential(*model.blocks)
    return split, split.shard(
        model, shard=case.level, units=units, state=None if case.planned else PARTS[world]
    )


def train(case: ShardCase, world: int) -> dict[str, Any]:
    """Train a case and return what this rank learns."""
    split, model = start(case, world)
    if case.late:
        validate(split, model)
    update = make_optimizer(case, model)
    norms: list[float] = []
    computed: list[int] = []  # rows of each pass that the first block computed
    model.blocks[0].register_forward_hook(
        lambda _, given, __: computed.append(len(given[0])) if model.training else None
    )
    loader = split.loader(data(), seed=2)
    while len(norms) < STEPS:
        for batch in loader:
            if case.fails and len(norms) in (0, 2):
                fail(case, model, batch)
            with (
                split.no_sync(model)
                if case.window and (len(norms) + 1) % case.accumulate
                else nullcontext()
            ):
                compute(case, split, model, batch)
            if case.validate and case.window:
                validate(split, model)
            norms.append(finish(case, len(norms), model, update))
            if case.validate:
                validate(split, model)
            if len(norms) == STEPS:
                break
    ledger = model.exchange.ledger
    return {
        "weights": whole(model),
        "norms": norms,
        "computed": computed,
        "now": dict(ledger.now),
        "most": dict(ledger.most),
        "peak": ledger.peak,
    }


def fail(case: ShardCase, model: Any, batch: Any) -> None:
    """Run a pass that raises between two blocks, and check that the loop sees the error."""

    def end(_: Any) -> None:
        raise FloatingPointError

    hook = model.blocks[0].register_forward_hook(
        lambda _, __, rows: rows.register_hook(end) and None
    )
    try:
        objective(case, model, *batch).backward()
    except FloatingPointError:
        model.zero_grad()
    else:
        raise AssertionError("it ended")
    hook.remove()


def compute(case: ShardCase, split: Split, model: Any, batch: Any) -> None:
    if case.micros:
        count = (lambda part: len(part.batch[1])) if "momentum" in case.optimizer else None
        for part in split.parts(batch, count):
            part.backward(objective(case, model, *part.batch) / case.accumulate)
        return
    loss = objective(case, model, *batch) / case.accumulate
    (split.scale(loss) if case.by_loss else loss).backward()


def validate(split: Split, model: Any) -> None:
    model.eval()
    for inputs, _ in split.loader(data(), training=False):
        model(inputs)  # with gradients that nobody uses
        with torch.inference_mode():
            model(inputs)
    model.train()


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return the complete parameters by name."""
    sharded = model.exchange
    found: dict[str, torch.Tensor] = {}
    for flat in [flat for unit in [sharded.root, *sharded.units] for flat in unit.flats]:
        values = torch.empty(flat.cuts[-1][1], dtype=flat.shard.dtype, device=flat.shard.device)
        for work in flat.collect(values, flat.shard):
            work.wait()
        for slot in flat.slots:
            part = values[slot.start : slot.start + slot.numel]
            found[slot.names[0]] = part.view(slot.shape).clone()
    for slot in sharded.whole.slots if sharded.whole is not None else ():
        found[slot.names[0]] = slot.piece.detach().clone()
    return found


SAVED, SAVED_AT = (
    ShardCase(clip=0.1, groups=True, tied=True, unused=True, shared=True, frozen=("blocks.0.up",)),
    2,
)


def train_and_save(world: int, path: str) -> dict[str, Any]:
    """Train two steps, save a checkpoint, and train the rest.

    Also returns the state dicts with which plain PyTorch could continue from there.
    """
    split, model = start(SAVED, world)
    update = make_optimizer(SAVED, model)
    taken: dict[str, Any] = {}
    steps, loader = 0, split.loader(data(), seed=2)
    while steps < STEPS:
        for batch in loader:
            compute(SAVED, split, model, batch)
            finish(SAVED, steps, model, update)
            steps += 1
            if steps == SAVED_AT:
                split.save(path, model, update, {"loop": split.state_dict()})
                taken = {
                    "model": split.model_state(model),
                    "optimizer": split.optimizer_state(update),
                }
            if steps == STEPS:
                break
    return {"weights": whole(model), **taken}


def train_on(world: int, path: str) -> dict[str, torch.Tensor]:
    """Train the rest with other shares; on two ranks parameters aren't sharded."""
    split, model = start(
        msgspec.structs.replace(SAVED, level="state" if world == 2 else "all"), world
    )
    update = make_optimizer(SAVED, model)
    for group in update.param_groups:
        group["lr"] = 99.0  # the checkpoint overwrites it
    for each in model.parameters():
        each.data.fill_(0.5)
    split.load_state_dict(split.load(path, model, update)["loop"])
    steps, loader = SAVED_AT, split.loader(data(), seed=2)
    while steps < STEPS:
        for batch in loader:
            compute(SAVED, split, model, batch)
            finish(SAVED, steps, model, update)
            steps += 1
            if steps == STEPS:
                break
    return {**whole(model), "seen": model.seen}


def step_once(split: Split, model: Any, update: Any) -> None:
    for inputs, labels in split.loader(data()):
        objective(model.case, model, inputs, labels).backward()
        update.step()
        return


def last_sentence(program: Callable[[], Any]) -> str:
    """Return the error with which a program ends."""
    try:
        program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
