"""What the workloads that lay their parts on several devices share: names of placements, pictures, the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

from evener.errors import RequestError
from evener.workloads.datasets.stripes import pictures
from evener.workloads.protocol import Place
from evener.workloads.torch_backend.workload import Lay

SINGLE = ("", "single")


def lay_for(place: Place, known: Mapping[str, Lay], least: int = 2) -> Lay | None:
    """How the place wants the parts laid; None for one device. RequestError for an unknown name or too few devices."""
    if place.placement in SINGLE:
        return None
    if place.placement not in known:
        raise RequestError(f"There is no placement {place.placement!r}.", f"Choose {listed(('single', *known))}.")
    if len(place.devices) < least:
        raise RequestError(
            f"The placement {place.placement} needs {least} devices; it has {len(place.devices)}.",
            "Name more with --devices.",
        )
    return known[place.placement]


def listed(names: Sequence[str]) -> str:
    """The names, for a sentence."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def picture_batch(rows: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Pictures (rows, 3, side, side) and their classes (rows,)."""
    images, labels = pictures(rows, side, classes)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the batch, computed where the logits are."""
    return F.cross_entropy(logits, labels.to(logits.device, non_blocking=True))
