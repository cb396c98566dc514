"""Losses that are means over rows, as people write them.

The loss of a few rows is the mean of the rows' own losses. A loss gets its network and a batch: x
(N, 6), classes (N,), targets (N, 2), other (N, 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Net = Any
Loss = Callable[[Net, dict[str, Tensor]], Tensor]


def _classes(net: Net, batch: dict[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["classes"], **options)


def _diffusion(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Draw noise and time steps for each row."""
    x = batch["x"]
    noise, time = torch.randn_like(x), torch.rand(len(x), 1, dtype=x.dtype)
    return F.mse_loss(net((1 - time) * x + time * noise), noise[:, :3])


def _autoencoder(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Return a variational autoencoder's loss: the error plus the mean divergence of rows."""
    mean, log_variance, _ = net(batch["x"]).unbind(1)
    drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
    return (drawn - batch["targets"][:, 0]).square().mean() + 0.1 * divergence.mean()


def _penalty(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Return a penalty on each row's gradient with respect to the inputs."""
    x = batch["x"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return _classes(net, batch) + 0.1 * slope.square().sum(1).mean()


def _triplet(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Take the three inputs of a triplet from one row."""
    return F.triplet_margin_loss(net(batch["x"]), net(batch["other"]), net(batch["x"].flip(1)))


def _taught(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Use detached outputs of the same network as targets."""
    with torch.no_grad():
        soft = net(batch["other"]).softmax(-1)
    return F.kl_div(net(batch["x"]).log_softmax(-1), soft, reduction="batchmean")


def _mixture(net: Net, batch: dict[str, Tensor]) -> Tensor:
    """Return the negative log-likelihood under a mixture of three Gaussians."""
    centres = net(batch["x"])
    return -torch.logsumexp(-0.5 * (centres - batch["targets"][:, :1]).square(), 1).mean()


def _quantile(net: Net, batch: dict[str, Tensor]) -> Tensor:
    error = batch["targets"][:, :1] - net(batch["x"])
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def _focal(net: Net, batch: dict[str, Tensor]) -> Tensor:
    each = _classes(net, batch, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def _gumbel(net: Net, batch: dict[str, Tensor]) -> Tensor:
    chosen = F.gumbel_softmax(net(batch["x"]), hard=True)
    return (
        (chosen * torch.arange(3.0).to(chosen)).sum(1).sub(batch["targets"][:, 0]).square().mean()
    )


def _noisy(net: Net, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"] + 0.1 * torch.randn_like(batch["x"])), batch["classes"])


def _tasks(net: Net, batch: dict[str, Tensor]) -> Tensor:
    found = net(batch["x"])
    return F.cross_entropy(found, batch["classes"]) + 0.3 * F.l1_loss(
        found[:, :2], batch["targets"]
    )


def _learned_scale(net: Net, batch: dict[str, Tensor]) -> Tensor:
    found = net(batch["x"])
    return F.gaussian_nll_loss(found[:, 0], batch["targets"][:, 0], found[:, 1].square() + 0.1)


LOSSES: dict[str, tuple[Loss, bool]] = {  # whether it draws random numbers
    "squares": (lambda net, batch: F.mse_loss(net(batch["x"])[:, :2], batch["targets"]), False),
    "absolute": (lambda net, batch: F.l1_loss(net(batch["x"])[:, :2], batch["targets"]), False),
    "Huber": (lambda net, batch: F.huber_loss(net(batch["x"])[:, :2], batch["targets"]), False),
    "classes": (_classes, False),
    "label smoothing": (lambda net, batch: _classes(net, batch, label_smoothing=0.1), False),
    "margins": (lambda net, batch: F.multi_margin_loss(net(batch["x"]), batch["classes"]), False),
    "several classes": (
        lambda net, batch: F.binary_cross_entropy_with_logits(
            net(batch["x"])[:, :2], (batch["targets"] > 0).double()
        ),
        False,
    ),
    "Poisson": (
        lambda net, batch: F.poisson_nll_loss(net(batch["x"])[:, 0], batch["classes"].double()),
        False,
    ),
    "Gaussian": (_learned_scale, False),
    "mixture density": (_mixture, False),
    "quantiles": (_quantile, False),
    "focal": (_focal, False),
    "two tasks": (_tasks, False),
    "triplets in a row": (_triplet, False),
    "a teacher": (_taught, False),
    "similar pairs in a row": (
        lambda net, batch: F.cosine_embedding_loss(
            net(batch["x"]), net(batch["other"]), 2 * (batch["classes"] > 0).double() - 1
        ),
        False,
    ),
    "a gradient penalty": (_penalty, False),
    "diffusion": (_diffusion, True),
    "variational autoencoder": (_autoencoder, True),
    "Gumbel": (_gumbel, True),
    "noise on inputs": (_noisy, True),
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cell(x.reshape(-1, 3, 2))[0][:, -1])
        return found


class _Tied(nn.Module):
    """One matrix for both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)))[:, :3]
        return found


class _Skipped(nn.Module):
    """Stochastic depth: a row skips the middle now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.first(x))
        kept = (torch.rand(len(x), 1) < 0.7).to(x) if self.training else 0.7
        last: Tensor = self.last(found + kept * torch.tanh(self.middle(found)))
        return last


def _frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    return net


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 3))


def _simple(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # True: it can't be compared
    "layer norm": (lambda: _simple(nn.LayerNorm(8)), False),
    "group norm": (lambda: _simple(nn.GroupNorm(2, 8)), False),
    "RMS norm": (lambda: _simple(nn.RMSNorm(8)), False),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), _simple()
        ),
        False,
    ),
    "spectral norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3)
        ),
        True,  # each pass makes its own step towards the norm
    ),
    "weight norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)
        ),
        False,
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2), nn.Flatten()),
        False,
    ),
    "recurrent": (_Recurrent, False),
    "attention": (_attention, False),
    "tied weights": (_Tied, False),
    "a frozen first layer": (_frozen, False),
    "dropout": (lambda: _simple(nn.Dropout(0.3)), True),
    "alpha dropout": (lambda: _simple(nn.AlphaDropout(0.3)), True),
    "random ReLU": (lambda: _simple(nn.RReLU()), True),
    "stochastic depth": (_Skipped, True),
}
