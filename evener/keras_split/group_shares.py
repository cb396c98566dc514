"""Agreement of a Keras group's processes before they train: whose share is whose, and whether shares change."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from ..plan.file import Share
from ..training.launched import find_host, launched_device
from ..training.share_order import RankInfo, check_agreement, check_places
from .engines.group import Group


def order_by_device(active: Sequence[Share], group: Group) -> tuple[int, ...]:
    """The place in `active` of each rank's share; in TF_CONFIG's order where no process knows its device.

    Every process calls it. PlanError, in all of them, if not each share has a process of its own.
    """
    host = find_host(share.host for share in active)
    device = launched_device() or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = [i for i, share in enumerate(active) if share.device == device and host in ("", share.host)]
    places = [0.0] * group.size
    places[group.rank] = own[0] + 1.0 if len(own) == 1 else 0.0
    (summed,) = group.sum_now([tf.constant(places)])
    found = [int(place) - 1 for place in summed]
    if max(found) < 0:
        return tuple(range(group.size))
    return check_places(active, [None if place < 0 else place for place in found])


def check_rebalance(rebalance: bool, group: Group) -> None:
    """RequestError, in all processes, if `rebalance` isn't the same in all; every process calls it."""
    (said,) = group.sum_now([tf.one_hot(group.rank, group.size, float(rebalance), 0.0)])
    check_agreement([RankInfo("", "", options={"rebalance": bool(each)}) for each in said])
