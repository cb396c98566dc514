"""Programs can copy and pickle the functions that evener run wraps."""

from __future__ import annotations

import copy
import pickle
import shutil

import pytest

from evener.program import install


def test_a_wrapped_function_is_copied_and_pickled_as_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs send torch.save to other processes, and copy objects that refer to it."""
    monkeypatch.setattr(shutil, "which", shutil.which)  # unwrapped at the end
    install._wrap({"shutil": (("which", "none:none"),)}, shutil)
    assert type(shutil.which).__name__ == "WrappedFunction"
    held = {"find": shutil.which}
    for made in (copy.copy(held), copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert made["find"] is shutil.which
