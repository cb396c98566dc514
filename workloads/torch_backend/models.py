"""Built-in PyTorch models, and functions that make batches of synthetic data for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from evener.errors import RequestError

from ..datasets import digits, grey_noise, sine_waves, stripes, text_lengths
from ..protocol import WorkerSetup, Workload, pick
from .batches import Data
from .tiling import TilesNet, conv_blocks
from .workload import PlaceParts, Recipe, TorchWorkload

CONVOLUTIONS = (32, 64, 128, 256, "pool", 512, 512, 512, 512, "pool")
DENSE = (2048, 2048, 2048, 2048, 2048, 1024)


def classifier(
    module: nn.Module, learning_rate: float, sample_batch: Callable[[int], Any]
) -> Recipe:
    """Return the recipe of a classifier that is trained by Adam with cross-entropy."""
    optimizer = torch.optim.Adam(module.parameters(), learning_rate)
    return Recipe(
        module, optimizer, cross_entropy, sample_batch=lambda rows: as_tensors(sample_batch(rows))
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy; the labels are first moved to the device of the logits."""
    return F.cross_entropy(logits, labels.to(logits.device, non_blocking=True))


def as_tensors(batch: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
    """Convert a batch of arrays to tensors, with the channels of images first."""
    x, labels = (torch.from_numpy(array) for array in batch)
    return x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x, labels


def maxer() -> nn.Sequential:
    """Return an MNIST network that is much larger than needed, as in the workload `keras_maxer`."""
    layers: list[nn.Module] = []
    before = 1
    for filters in CONVOLUTIONS:
        if isinstance(filters, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, filters, 3, padding=1), nn.ReLU()]
            before = filters
    layers.append(nn.Flatten())
    for inputs, units in pairwise((before * 7 * 7, *DENSE)):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(DENSE[-1], 10))


def mnist(filters: int, dense: int) -> nn.Sequential:
    """Return a small convolutional network for 28 x 28 images, as in the workload `keras_mnist`."""
    blocks: list[nn.Module] = []
    for before, after in ((1, filters), (filters, 2 * filters)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = (nn.Flatten(), nn.Linear(2 * filters * 7 * 7, dense), nn.ReLU(), nn.Linear(dense, 10))
    return nn.Sequential(*blocks, *head)


class GruNet(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Stacked GRU layers with a dense head, for classifying sequences.

    The input has shape (rows, steps, features), the output (rows, classes).
    """

    def __init__(self, features: int, units: int, layers: int, dense: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, units, layers, batch_first=True)
        self.head = nn.Sequential(nn.Linear(units, dense), nn.ReLU(), nn.Linear(dense, classes))

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the logits, computed from the last state of each sequence."""
        states, _ = self.recurrent(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits


FIRST_CHANNELS = (16, 32)
SECOND_CHANNELS = (128, 256, 512)
NORMS = ("group", "batch")


class DepthNet(nn.Module):  # type: ignore[misc]
    """Convolutional network of two halves, which can be placed on two devices.

    The input has shape (rows, 3, side, side) with sides of at least 32 pixels, the output (rows,
    classes). Raises `RequestError` if `norm` is neither "group" nor "batch".
    """

    def __init__(self, classes: int = 10, norm: str = "group") -> None:
        super().__init__()
        if norm not in NORMS:
            raise RequestError(
                f"torch_depth has no normalisation {norm!r}.", f"Choose {' or '.join(NORMS)}."
            )
        self.norm = norm
        self.first = nn.Sequential(*conv_blocks((3, *FIRST_CHANNELS), norm))
        self.second = nn.Sequential(*conv_blocks((FIRST_CHANNELS[-1], *SECOND_CHANNELS), norm))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(SECOND_CHANNELS[-1], classes)
        )
        self._devices: tuple[torch.device, ...] = ()
        self._micro_batches = 1

    def place(self, devices: Sequence[torch.device], micro_batches: int = 1) -> DepthNet:
        """Move the halves to the first and second device, and return the network.

        With several micro-batches, both devices compute at the same time. Raises `RequestError` for
        several micro-batches with batch normalization, because the results would change.
        """
        if micro_batches > 1 and self.norm == "batch":
            raise RequestError(
                "Batch normalisation over a micro-batch is not that over the batch.",
                "Take --set norm=group, or the placement halves.",
            )
        self._devices, self._micro_batches = tuple(devices[:2]), micro_batches
        self.first.to(devices[0])
        self.second.to(devices[1])
        self.head.to(devices[1])
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, on the device of the second half."""
        if not self._devices:
            return self._end(self.first(images))
        first, second = self._devices
        outputs = []
        for piece in images.chunk(self._micro_batches):
            # nothing here blocks: the first device begins the next piece while the copy and the
            # second half of this piece are pending
            middle = self.first(piece.to(first, non_blocking=True))
            outputs.append(self._end(middle.to(second, non_blocking=True)))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _end(self, middle: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(middle))
        return logits


PADDING = 0  # the padding token
IGNORED = -100  # the target that cross-entropy ignores
EXPANSION = 4  # width of a block's hidden dense layer, relative to the model's width


def make_recipe(model: Mapping[str, int], texts: Mapping[str, Any], learning_rate: float) -> Recipe:
    """Return the recipe of a small language model, trained by AdamW on texts of unequal length."""
    decoder = Decoder(**model)
    data = Data(Texts(**texts), {"collate_fn": pad_texts})
    return Recipe(
        decoder, torch.optim.AdamW(decoder.parameters(), learning_rate), mean_over_tokens, data
    )


class Texts(Dataset):  # type: ignore[misc]  # torch is not followed
    """Data set of random token sequences with lognormal lengths.

    `lengths` doesn't count the first token of a text, because that is never predicted.
    """

    def __init__(
        self, rows: int, median: float, sigma: float, longest: int, vocabulary: int, seed: int
    ) -> None:
        self.lengths: list[int] = text_lengths(rows, median, sigma, longest, seed).tolist()
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(1, vocabulary, (longest + 1 + rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """Return the tokens of a text.

        There is one token more than `lengths` says, because `lengths` doesn't count the first one.
        """
        # Each token except the first is predicted from the previous tokens.
        return self._tokens[row : row + self.lengths[row] + 1]


def pad_texts(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Collate texts into padded inputs and targets; targets are the inputs shifted by one token."""
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=PADDING)
    return inputs, pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)


def mean_over_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens except padding."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Decoder(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Decoder-only transformer with learned position embeddings.

    The input has shape (rows, length), the output (rows, length, vocabulary).
    """

    def __init__(self, vocabulary: int, longest: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position."""
        states = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states))
        return logits


class DecoderBlock(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Transformer block with pre-normalization: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, EXPANSION * width), nn.GELU(), nn.Linear(EXPANSION * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return the hidden states after attention and MLP."""
        parts = (
            self.attend(self.before(states))
            .unflatten(2, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        queries, keys, values = parts
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.join(seen.transpose(1, 2).flatten(2))
        added: Tensor = states + self.dense(self.between(states))
        return added


def build(name: str, setup: WorkerSetup, settings: Mapping[str, Any]) -> Workload:
    """Build a built-in model as a workload, placed on several devices if the setup says so."""
    learning_rate = settings["learning_rate"]
    if name == "torch_text":
        texts = partial(make_recipe, pick(Decoder, settings), pick(Texts, settings), learning_rate)
        return TorchWorkload(setup, texts)
    make, batch, placements = MODELS[name]
    place, sample = placements.get(setup.placement), partial(batch, **pick(batch, settings))
    return TorchWorkload(
        setup,
        lambda: classifier(make(**pick(make, settings)), learning_rate, sample),
        place and partial(place, **pick(place, settings)),
    )


MODELS: Mapping[
    str, tuple[Callable[..., nn.Module], Callable[..., Any], Mapping[str, PlaceParts]]
] = {
    "torch_maxer": (maxer, grey_noise, {}),
    "torch_mnist": (mnist, digits, {}),
    "torch_gru": (GruNet, sine_waves, {}),
    "torch_depth": (
        DepthNet,
        stripes,
        {"halves": lambda net, to: net.place(to), "halves-micro": DepthNet.place},
    ),
    "torch_tiles": (TilesNet, stripes, {"tiles": TilesNet.place}),
}  # name -> (makes the module, makes its batches, placements)
