"""What may follow `@`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.discover import discover
from evener.devices.terms import LARGEST_BYTES, parse_limit, write_limit
from evener.devices.types import Limit
from evener.errors import RequestError


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("60%", Limit(60.0)),
        ("33.3%", Limit(33.3)),
        ("8GiB", Limit(None, 8 << 30)),
        ("8 gib", Limit(None, 8 << 30)),
        ("1.5MB", Limit(None, 1_500_000)),
        (".5KiB", Limit(None, 512)),
        ("60%+8GiB", Limit(60.0, 8 << 30)),
        ("8GiB + 60%", Limit(60.0, 8 << 30)),
        ("100%", Limit(100.0)),
    ],
)
def test_limits_read_as_people_write_them(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("spec", ["sim:t4@900GiB", "cpu/2@60%+900TiB", "cpu:0,1@900TiB"])
def test_a_limit_above_all_memory_is_a_slip(spec: str) -> None:
    """All memory means a machine's or a card's. Any limit below it is valid."""
    with pytest.raises(RequestError, match="of memory: it has"):
        discover(spec, environ={})
    assert discover("sim:t4@8GiB", environ={}).devices[0].limit.memory_bytes == 8 << 30


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "%",
            "60",
            "0%",
            "101%",
            "-5%",
            "nan%",
            "inf%",
            "1e1%",
            "60%+50%",
            "1GiB+2GiB",
            "8G",
            "8XiB",
            "0B",
            "0.4B",
        ),
        *("60%+", "+60%", "60%8GiB", "٦٠%", "9" * 40 + "%", "99999999TiB"),
    ],
)
def test_anything_else_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_limit(text)
    assert caught.value.remedy


LIMITS = st.builds(
    Limit,
    st.none()
    | st.floats(0, 100, exclude_min=True, allow_subnormal=False).filter(
        lambda number: number >= 1e-6
    ),
    st.none() | st.integers(1, LARGEST_BYTES),
).filter(bool)


@given(LIMITS)
def test_a_written_limit_reads_back_as_itself(limit: Limit) -> None:
    assert parse_limit(write_limit(limit)) == limit


@given(st.text(alphabet="0123456789.%+-GMKiBTe ", max_size=20))
def test_any_text_is_a_limit_or_a_request_error(text: str) -> None:
    try:
        limit = parse_limit(text)
    except RequestError:
        return
    assert limit
    assert parse_limit(write_limit(limit)) == limit
