"""Decide what to recommend to the user after a search."""

from __future__ import annotations

import msgspec

from ..search.ranking import UNCLEAR
from ..types import Doubt
from ..verdict import Action, Recommendation, Rival, Verdict

# fraction of the blocks that other processes must disturb for a measurement to count as disturbed
MOSTLY = 0.5
# relative: measurements of one layout that differ by more are unreliable
DOUBTFUL = 0.5
REASONS: tuple[tuple[Doubt, float], ...] = (("disturbed", MOSTLY), ("changed", DOUBTFUL))


def advise(verdict: Verdict) -> Recommendation:
    """Return what the user should do after the search.

    - Fix the code or the data first, if the loss was NaN or infinite.
    - Measure again, if the measurements can't be trusted.
    - Train on one device or with equal shares, without a plan, if that is as fast.
    - Otherwise, train with the plan, which has the layout that the search found.
    """
    chosen = verdict.chosen
    own = Recommendation("plan", chosen.devices, chosen.batches, chosen.description)

    def do(action: Action, reason: str = "") -> Recommendation:
        return msgspec.structs.replace(own, action=action, reason=reason)

    if any(doubt.code == "not_finite" for doubt in verdict.doubts):
        return do("fix_code", "not_finite")
    reason = _find_reason(verdict)
    if reason:
        return do("measure_again", reason)
    in_passes = chosen.micro != chosen.batches
    if chosen.kind == "one_device":
        return do("plan" if in_passes or chosen.knobs else "one_device")
    if chosen.kind not in ("equal_shares", "other_shares"):
        return own
    single = find_single(verdict) if verdict.objective is None else None
    if single is not None:
        return _recommend("one_device", single)
    if verdict.equal_shares:
        return do("plain_parallel")
    return own


def _find_reason(verdict: Verdict) -> str:
    """Return a short code for the reason why the measurements can't be trusted.

    This is the code of a warning, "uncertain" (imprecise samples/s) or "uncompared" (no simpler
    layout was measured). Returns "" if the measurements can be trusted.
    """
    for code, most in REASONS:
        if any(doubt.code == code and doubt.value >= most for doubt in verdict.doubts):
            return code
    if not verdict.rate.known:
        return "uncertain"
    if _lacks_comparison(verdict):
        return "uncompared"
    return ""


def _lacks_comparison(verdict: Verdict) -> bool:
    """Return whether there was no time to compare the plan's unequal shares with another layout.

    Returns False for plans without unequal shares.
    """
    if verdict.chosen.kind != "other_shares":
        return False
    compared = [rival for rival in verdict.rivals if rival.gain is not None]
    return not compared and any(left_out.reason == "no_time" for left_out in verdict.left_out)


def find_single(verdict: Verdict) -> Rival | None:
    """Return a single device that trains as fast as the plan, or None.

    It must use the plan's global batch, or a smaller one if the user didn't request a batch.
    """
    batch = verdict.chosen.global_batch
    for rival in verdict.rivals:
        if rival.kind != "one_device" or not is_equal(rival) or rival.rate.samples_per_second <= 0:
            continue
        same = rival.global_batch == batch
        if same or (rival.global_batch < batch and not verdict.batch_given):
            return rival
    return None


def is_equal(rival: Rival) -> bool:
    """Return whether a layout counts as equally fast as the plan.

    It must tie with the plan, and its measured speed must be within 3 % of the plan's.
    """
    gap = rival.difference
    return rival.tie and gap is not None and abs(gap.value) <= UNCLEAR


def _recommend(action: Action, rival: Rival) -> Recommendation:
    rows = " + ".join(map(str, rival.batches))
    return Recommendation(action, rival.devices, rival.batches, f"{rows} on {rival.name}")
