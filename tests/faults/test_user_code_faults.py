"""The user's own workload raises: their file and line are named, not ours, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from evener.balancer.session import Request, Session
from evener.errors import EvenerError

pytestmark = pytest.mark.slow

BUILD = """
def build():
    import keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    {extra}
    model.compile("sgd", "mse", jit_compile=False)
    return model

def sample_batch(n):
    import numpy as np
    {batch}
    return np.zeros((n, 4), "float32"), np.zeros((n, 2), "float32")
"""


@pytest.mark.parametrize(
    ("extra", "batch", "words"),
    [
        ("raise ValueError('no such dataset')", "pass", "train.py:5: ValueError: no such dataset"),
        ("pass", "raise KeyError('labels')", "train.py:11: KeyError: 'labels'"),
    ],
)
def test_the_line_that_raised_is_named_in_one_sentence(tmp_path: Path, extra: str, batch: str, words: str) -> None:
    """While the model is built, and while a batch is made."""
    pytest.importorskip("tensorflow")
    source = tmp_path / "train.py"
    source.write_text(BUILD.format(extra=extra, batch=batch))
    session = Session(Request(devices="cpu/2:0", workload=f"{source}:build", budget_seconds=30.0))
    with pytest.raises(EvenerError) as fault:
        list(session.events())
    session.close()
    assert words in fault.value.message
    assert "\n" not in fault.value.message
    assert fault.value.remedy
    assert not psutil.Process().children()
