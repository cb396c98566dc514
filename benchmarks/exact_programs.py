"""Small models whose losses are means over rows, so no audit may find a difference.

Each program is a model and a loss function of the model and a batch (points, classes): 64 float32
numbers and one of four classes per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CLASSES = 4
WIDTH = 64
Loss = Callable[[nn.Module, Any], torch.Tensor]


class ExactProgram(msgspec.Struct, frozen=True):
    """A model, its loss function, and whether the model is compiled for training."""

    model: Callable[[], nn.Module]
    loss: Loss
    compiled: bool = False


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy."""
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


def classify_sharply(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy at a low temperature, which amplifies rounding errors."""
    return functional.cross_entropy(100.0 * model(batch[0]), batch[1])


def regress(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean squared error."""
    return (model(batch[0]) - functional.one_hot(batch[1], CLASSES)).square().mean()


def restore(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the reconstruction error of the points, taken as pixels between 0 and 1."""
    wanted = batch[0].sigmoid()
    return functional.binary_cross_entropy_with_logits(model(batch[0]), wanted)


def penalize(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy plus a gradient penalty, which needs second derivatives."""
    points = batch[0].detach().requires_grad_()
    scores = model(points)
    (slopes,) = torch.autograd.grad(scores.square().sum(), points, create_graph=True)
    penalty = (slopes.flatten(1).norm(dim=1) - 1.0).square().mean()
    return functional.cross_entropy(scores, batch[1]) + 0.1 * penalty


def explain(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the negative log-likelihood of the points under a normalizing flow."""
    scales, shifts = model(batch[0][:, : WIDTH // 2]).chunk(2, dim=1)
    scales = scales.tanh()
    latent = torch.cat([batch[0][:, : WIDTH // 2], batch[0][:, WIDTH // 2 :] * scales.exp()], 1)
    latent = latent + functional.pad(shifts, (WIDTH // 2, 0))
    return (0.5 * latent.square().sum(1) - scales.sum(1)).mean()


def classify_double(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy in float64."""
    return functional.cross_entropy(model(batch[0].double()), batch[1])


def classify_half(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a bfloat16 model."""
    return functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


class Recurrent(nn.Module):  # type: ignore[misc]  # torch isn't followed
    """A recurrent network of this kind that reads the points eight at a time."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.reader = kind(8, 32, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        made: torch.Tensor = self.head(self.reader(points.unflatten(1, (8, 8)))[0][:, -1])
        return made


class Residual(nn.Module):  # type: ignore[misc]
    """A residual block of convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image of the same shape."""
        made: torch.Tensor = image + self.mix(functional.silu(self.conv(self.norm(image))))
        return made


class Experts(nn.Module):  # type: ignore[misc]
    """A mixture of four experts, two of which are used for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        chances = self.gate(points).softmax(1)
        least = chances.topk(2, dim=1).values[:, -1:]
        chances = chances * (chances >= least)
        scores = torch.stack([each(points) for each in self.experts], 1)
        return (chances.unsqueeze(2) * scores).sum(1)


class Words(nn.Module):  # type: ignore[misc]
    """A model that reads the points as the tokens of a text."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(256, 32, mode="mean", sparse=sparse)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        words = (points.float() * 64 + 128).long().clamp(0, 255)
        made: torch.Tensor = self.head(self.bag(words))
        return made


class Checkpointed(nn.Module):  # type: ignore[misc]
    """A model with activation checkpointing: its layers are recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the class scores."""
        for each in self.layers:
            points = checkpoint(each, points, use_reentrant=False)
        made: torch.Tensor = self.head(points)
        return made


def _image() -> nn.Module:
    return nn.Unflatten(1, (1, 8, 8))


def _dense(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, CLASSES))


def _deep(layers: int) -> nn.Module:
    return _dense(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)])


def _convolutional(*after: nn.Module) -> nn.Module:
    first = nn.Conv2d(1, 16, 3, padding=1)
    return nn.Sequential(_image(), first, *after, nn.Flatten(), nn.LazyLinear(CLASSES))


def _attention(width: int, layers: int, dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, "gelu", batch_first=True)
    texts = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (8, 8)), nn.Linear(8, width), texts, nn.Flatten(), nn.LazyLinear(CLASSES)
    )


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        _image(),
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Flatten(),
    )


def _spectral() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


EXACT_PROGRAMS = {
    "dropout": ExactProgram(lambda: _dense(nn.ReLU(), nn.Dropout(0.3)), classify),
    "squares": ExactProgram(lambda: _dense(nn.Tanh()), regress),
    "batch normalization": ExactProgram(
        lambda: _convolutional(nn.BatchNorm2d(16), nn.ReLU()), classify
    ),
    "max pooling": ExactProgram(lambda: _convolutional(nn.ReLU(), nn.MaxPool2d(2)), classify),
    "layer normalization": ExactProgram(lambda: _dense(nn.LayerNorm(WIDTH), nn.GELU()), classify),
    "deep": ExactProgram(lambda: _deep(8), classify),
    "very deep": ExactProgram(lambda: _deep(24), regress),
    "compiled": ExactProgram(lambda: _dense(nn.SiLU()), classify, compiled=True),
    "attention": ExactProgram(lambda: _attention(32, 2, 0.1), classify),
    "wide attention": ExactProgram(lambda: _attention(128, 4, 0.0), regress),
    "LSTM": ExactProgram(lambda: Recurrent(nn.LSTM), classify),
    "two GRUs": ExactProgram(
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.2), classify
    ),
    "residual images": ExactProgram(
        lambda: _convolutional(Residual(16), Residual(16), nn.InstanceNorm2d(16)), classify
    ),
    "float64": ExactProgram(lambda: _dense(nn.Tanh()).double(), classify_double),
    "bfloat16": ExactProgram(lambda: _dense(nn.ReLU()).bfloat16(), classify_half),
    "gradient penalty": ExactProgram(lambda: _dense(nn.Softplus()), penalize),
    "autoencoder": ExactProgram(_autoencoder, restore),
    "experts": ExactProgram(Experts, classify),
    "low temperature": ExactProgram(lambda: _deep(4), classify_sharply),
    "flow": ExactProgram(
        lambda: nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        explain,
    ),
    "words": ExactProgram(lambda: Words(sparse=False), classify),
    "sparse words": ExactProgram(lambda: Words(sparse=True), classify),
    "checkpoints": ExactProgram(Checkpointed, classify),
    "spectral norm": ExactProgram(_spectral, classify),
}
