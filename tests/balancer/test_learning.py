"""The cost of a batch in learning, which is reported for every free batch."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.balancer import journal
from evener.balancer.store import runs
from evener.balancer.store.runs import find, journal_path, load_noise
from evener.live.journal import TRAINING_JOURNAL, NoiseEntry, StartEntry
from evener.system.files import runs_folder
from evener.training.noise_scale import NoiseScale, efficiency, rate_gain
from evener.tui.cli.main import run
from evener.tui.text.parsing import make_request

KNOTS = {
    "A": ((1, 5), (200, 8), (1000, 20), (4000, 70)),
    "B": ((1, 6), (200, 12), (1000, 40), (4000, 140)),
}
MACHINE = "".join(
    f'[[device]]\nname = "{name}"\nmemory_mib = 8000\nmemory_base_mib = '
    f"100\nmemory_per_sample_mib = 1\n"
    f"curve = {[list(knot) for knot in knots]}\n"
    for name, knots in KNOTS.items()
)


@pytest.fixture
def balance(own_folder: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that searches on a simulated machine.

    It returns what the verdict says about learning, and the whole JSON.
    """
    own_folder.joinpath("machine.toml").write_text(MACHINE)

    def search(*options: str) -> tuple[Any, Any]:
        assert run(["balance", "-d", "sim:machine.toml", "--json", *options]) == 0
        said = json.loads(capsys.readouterr().out)
        return said["verdict"]["learning"], said

    return search


@pytest.mark.parametrize("scale", [60, 10**7])
def test_a_batch_and_those_that_are_slower_have_their_worth(balance: Any, scale: int) -> None:
    values, plan = balance("--noise-scale", str(scale))
    batch = plan["layout"]["global_batch"]
    assert values["worth"][0] == pytest.approx(efficiency(batch, scale))
    assert all(
        value == pytest.approx(rate * efficiency(size, scale))
        for size, rate, value in values["frontier"]
    )
    text = "\n".join(plan["text"])
    assert "in small batches" in text
    assert runs.recover(journal.read(journal_path(find("last")))).verdict == text


def test_nothing_is_claimed_about_learning_if_nothing_is_known(balance: Any) -> None:
    free, said = balance()
    fixed, _ = balance("--global-batch", "1000", "--own-batch", "250")
    assert free is None
    assert "same loss" not in "\n".join(said["text"])
    assert fixed["noise_scale"] is fixed["worth"] is None, "the batch was given"
    assert (fixed["sgd_rate"], fixed["adam_rate"], fixed["sgd_rule"]) == (4, 2, "linear")


def test_a_training_tells_its_noise_scale_and_its_batch(
    balance: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = NoiseScale(3900.0, 2700.0, 6000.0, 400)
    start = StartEntry(time.time(), "train.py", "torch", ("GPU:0",), (512,), 0.0, "here", 1, 1)
    folder = runs_folder() / "20260101-000000-aaaa"
    folder.mkdir(parents=True)
    lines = [
        msgspec.json.encode(one) + b"\n"
        for one in (start, NoiseEntry(time.time(), 3200, 512, scale))
    ]
    folder.joinpath(TRAINING_JOURNAL).write_bytes(b"".join(lines))
    against, said = balance("--noise-scale", "last")
    assert against["own_batch"] == 512
    assert against["extra_samples"][1] <= against["extra_samples"][0] <= against["extra_samples"][2]
    own = said["layout"]["global_batch"]
    rates = {batch: rate for batch, rate, _ in against["frontier"]}
    assert rates[own] == said["throughput"]["samples_per_second"], "one figure for one layout"
    assert against["extra_samples"][0] == pytest.approx((own + 3900) / (512 + 3900))
    assert against["sgd_rule"] == "adascale"
    assert against["sgd_rate"] == pytest.approx(own / 512 / against["extra_samples"][0])
    batches = [batch for batch, _, _ in against["frontier"]]
    assert batches == sorted(set(batches))
    assert own in batches
    broken = runs_folder() / "20260102-000000-bbbb"
    broken.mkdir()
    broken.joinpath(TRAINING_JOURNAL).write_text("{}\n{}\n")
    assert load_noise("last").scale == scale, "what can't be read is skipped"
    folder.joinpath(TRAINING_JOURNAL).write_bytes(lines[0])
    options = ["balance", "-d", "sim:machine.toml", "--noise-scale"]
    for wrong, why in (
        ("last", "No noise scale was measured here."),
        ("20260101-", "No noise scale was measured in '20260101-'."),
        *((rows, "a number of rows") for rows in ("-3", "0.5", "0", "1e30")),
    ):
        assert run([*options, wrong]) == 2
        assert why in capsys.readouterr().err
    assert run([*options, "60", "--own-batch", "0"]) == 2
    folder.joinpath(TRAINING_JOURNAL).write_bytes(b"".join(lines))
    assert run([*options, "last", "--own-batch", "0"]) == 2
    assert "--own-batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rows"), [("1,000", 1000), ("1e5", 1e5), ("12,345,678.5", 12345678.5), ("1", 1)]
)
def test_rows_are_typed_as_any_number(text: str, rows: float) -> None:
    assert make_request(noise_scale=text).noise_scale == NoiseScale(rows, rows, rows, 0)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0, 1e18))
def test_the_rate_grows_no_faster_than_the_batch(batch: int, other: int, scale: float) -> None:
    gain, ratio = rate_gain(batch, other, scale), other / batch
    assert min(1.0, ratio) * 0.999 <= gain <= max(1.0, ratio) * 1.001
