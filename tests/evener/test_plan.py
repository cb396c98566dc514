"""A plan is read back from its file unchanged; anything else in a file gives one sentence."""

from __future__ import annotations

import math
import os
import re
import resource
import stat
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from evener import Plan, load_plan
from evener.errors import PlanError, RequestError
from evener.plan.check import check_fit
from evener.plan.file import (
    SCHEMA,
    Evidence,
    Fingerprint,
    Kind,
    PlanLayout,
    SearchSummary,
    Share,
    Throughput,
    make_layout,
    parse_plan,
    to_json,
    to_toml,
    with_current_schema,
)
from evener.plan.layout import MOST_ROWS
from evener.plan.solver import leave_out
from evener.printable import printable
from evener.shares.curves import Cost
from evener.system.files import write_atomically
from tests.support.launched_plan import make_plan

# quotes, astral planes and all other printable characters
TEXT = st.text(max_size=20).map(printable)
COUNT = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e9, allow_nan=False)
CURVES = st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), min_size=2, max_size=4).map(
    lambda knots: tuple(zip(*map(sorted, zip(*knots, strict=True)), strict=True))
)
CURVES = CURVES.filter(
    lambda knots: knots[-1][1] > 0 and len({rows for rows, _ in knots}) == len(knots)
) | st.just(())
COSTS = st.builds(Cost, SECONDS, SECONDS, SECONDS).filter(Cost.is_valid)


@st.composite
def layouts(draw: st.DrawFn) -> PlanLayout:
    batches = draw(st.lists(st.integers(0, 4096), min_size=1, max_size=5).filter(any))
    devices = draw(
        st.lists(TEXT.filter(bool), min_size=len(batches), max_size=len(batches), unique=True)
    )
    indexes = draw(st.permutations(range(8)))
    shares = tuple(
        Share(device, index, draw(TEXT), batch, 0.0, draw(TEXT))
        for device, index, batch in zip(devices, indexes, batches, strict=False)
    )
    kind: Kind = (
        "solo" if sum(map(bool, batches)) == 1 else draw(st.sampled_from(["split", "place"]))
    )
    micros = (
        tuple(draw(st.integers(min(batch, 1), batch)) for batch in batches)
        if draw(st.booleans())
        else None
    )
    engine = draw(st.sampled_from(["", "towers", "ddp"]))
    if kind == "split" and draw(st.booleans()):
        held = [draw(st.floats(0.01, 100)) * min(batch, 1) for batch in batches]
        parts = (each / sum(held) for each in held)
        kind = "shard"
        shares = tuple(
            msgspec.structs.replace(share, state=part)
            for share, part in zip(shares, parts, strict=True)
        )
    if draw(st.booleans()):
        shares = tuple(
            msgspec.structs.replace(share, curve=draw(CURVES), most=draw(COUNT)) for share in shares
        )
        return make_layout(kind, shares, tuple(batches), micros=micros, engine=engine)
    weights = [draw(st.floats(0.01, 100)) * min(batch, 1) for batch in batches]
    shares = tuple(
        msgspec.structs.replace(share, cost=draw(COSTS), tokens=draw(COUNT)) for share in shares
    )
    return make_layout(
        kind, shares, tuple(batches), ratios=tuple(each / sum(weights) for each in weights)
    )


@st.composite
def throughputs(draw: st.DrawFn) -> Throughput:
    low, value, high = sorted(draw(st.tuples(SECONDS, SECONDS, SECONDS)))
    return Throughput(value, low, high)


def _of_one_request(plan: Plan) -> Plan:
    """Return the plan with evidence on as many devices as its own layout has."""
    kept = (rival for rival in plan.evidence if len(rival.layout.share) == len(plan.layout.share))
    return msgspec.structs.replace(plan, evidence=tuple(kept))


PLANS = st.builds(
    Plan,
    created=st.just("2026-11-21T12:00:00Z"),
    workload=TEXT,
    framework=TEXT,
    precision=TEXT,
    xla=st.booleans(),
    layout=layouts(),
    throughput=throughputs(),
    evidence=st.lists(
        st.builds(
            Evidence, name=TEXT, layout=layouts(), throughput=throughputs(), tie=st.booleans()
        ),
        max_size=3,
    ).map(tuple),
    search=st.builds(
        SearchSummary,
        probes=COUNT,
        out_of_memory=COUNT,
        seconds=SECONDS,
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
        why_stopped=TEXT,
    ),
    fingerprint=st.builds(
        Fingerprint,
        devices=st.lists(TEXT, max_size=3).map(tuple),
        driver=TEXT,
        versions=st.dictionaries(TEXT, TEXT, max_size=3),
        workload_digest=TEXT,
    ),
    warnings=st.lists(TEXT, max_size=3).map(tuple),
).map(lambda plan: with_current_schema(_of_one_request(plan)))


def example(batches: tuple[int, ...] = (60, 0, 20)) -> Plan:
    """Return a plan for a request of three devices, with the middle one left out."""
    shares = tuple(Share(f"GPU-{i}", i, "GTX 1080", 0, 0.0) for i in range(len(batches)))
    kind = "split" if sum(map(bool, batches)) > 1 else "solo"
    return make_plan(
        make_layout(kind, shares, batches),
        workload="keras_mnist",
        framework="tensorflow",
        search=SearchSummary(9, 1, 12.5, 0, "the evidence is enough"),
        fingerprint=Fingerprint(
            ("GTX 1080 (8119 MiB)",), "580.1", {"tensorflow": "2.21.0"}, "ab12"
        ),
    )


@given(PLANS)
def test_a_plan_comes_back_from_both_forms_as_the_same_bytes(plan: Plan) -> None:
    for form in (to_toml, to_json):
        text = form(plan)
        again = parse_plan(text)
        assert again == plan
        assert form(again) == text


@given(PLANS, st.text(min_size=1), st.text(min_size=1))
def test_a_plans_texts_can_not_control_the_terminal_of_a_training(
    plan: Plan, name: str, warning: str
) -> None:
    """Training scripts print device names, and Python prints error messages."""
    layout = plan.layout
    shares = (
        msgspec.structs.replace(layout.share[0], device=f"{name}!", name=name, host=""),
        *layout.share[1:],
    )
    changed = msgspec.structs.replace(
        plan,
        layout=msgspec.structs.replace(layout, share=shares),
        warnings=(warning,),
    )
    for form in (to_toml, to_json):
        with suppress(PlanError):  # two devices of one name
            again = parse_plan(form(changed))
            assert _controls(again.layout.share[0].name + again.warnings[0]) == []
            assert parse_plan(form(again)) == again


@pytest.mark.parametrize(
    "text",
    [
        b'"\\u001b]0;owned\\u0007" = 1',
        b'{"\\u001b[2J": 1, "layout": {"share": [{"device": "a", "batch": 1}]}}',
        b'[layout]\nkind = "\\u009b31m"\n[[layout.share]]\ndevice = "a"\nbatch = 1',
        b'[[layout.share]]\ndevice = "\\u202ea"\nbatch = 1\nmicro = 5',
        b'[[layout.share]]\ndevice = "a"\nbatch = 1\n"\\u001b[31m" = 1',
    ],
)
def test_an_error_of_a_plan_can_not_control_the_terminal(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "\x1b[2J.toml"
    path.write_bytes(text)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    error = caught.value
    assert _controls("".join((str(error), *map(str, error.args), error.message))) == []


def _controls(text: str) -> list[str]:
    return [sign for sign in text if unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp")]


HUGE = {
    "4200 digits": 10**4200,
    "100 digits": 10**100,
    "23 digits": 99999999999999999999999,
    "65 bits": 1 << 64,
    "64 bits": 1 << 63,
    "61 bits": 1 << 60,
}


@pytest.mark.parametrize("number", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize(
    "key", ["batch", "index", "most", "tokens", "held_bytes", "peak_bytes", "micro"]
)
def test_a_number_that_no_training_has_is_refused_with_its_key(key: str, number: int) -> None:
    """Absurd numbers are refused in TOML, whose integers are unlimited here, and in JSON."""
    share = {"device": '"b"', "batch": "6", key: str(number)}
    toml = "\n".join(f"{name} = {value}" for name, value in share.items())
    json_share = ", ".join(f'"{name}": {value}' for name, value in share.items())
    for text in (
        f'[[layout.share]]\ndevice = "a"\nbatch = 6\n[[layout.share]]\n{toml}',
        f'{{"layout": {{"share": [{{"device": "a", "batch": 6}}, {{{json_share}}}]}}}}',
    ):
        with pytest.raises(PlanError) as caught:
            parse_plan(text.encode())
        assert key in str(caught.value)
        assert len(str(caught.value)) < 500


def test_the_whole_batch_is_bounded_too() -> None:
    shares = "".join(f'[[layout.share]]\ndevice = "{i}"\nbatch = {MOST_ROWS}\n' for i in range(2))
    with pytest.raises(PlanError, match="global_batch"):
        parse_plan(shares.encode())


@pytest.mark.parametrize("most", [0, 1, 7])
def test_a_lost_device_of_the_largest_plan_is_left_out_at_once(most: int) -> None:
    """With 1e100 rows this would never finish."""
    batches = (6, 60, MOST_ROWS - 66)
    shares = (Share(name, i, "", 0, 0.0, most=most) for i, name in enumerate("abc"))
    plan = make_plan(make_layout("split", tuple(shares), batches))
    parse_plan(to_toml(plan))
    for gone in "abc":
        assert sum(leave_out(plan, [("", gone)]).layout.batches) == MOST_ROWS


@given(st.binary(max_size=300).filter(lambda text: b"layout" not in text))
def test_bytes_that_are_no_plan_are_a_one_line_error(text: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert caught.value.remedy


@given(st.data())
def test_a_damaged_plan_is_read_or_is_a_one_line_error(data: st.DataObject) -> None:
    text = bytearray(data.draw(st.sampled_from([to_toml(example()), to_json(example())])))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(text) - 1))
        text[where : where + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        if not text:
            break
    try:
        plan = parse_plan(bytes(text))
    except PlanError:
        return
    assert parse_plan(to_toml(plan)) == plan
    assert parse_plan(to_json(plan)) == plan


SHARDED = b"""
[[layout.share]]
device = "cpu-0-of-2"
batch = 6
state = 0.25

[[layout.share]]
device = "cpu-1-of-2"
batch = 2
state = 0.75
"""


def test_parts_of_state_make_a_sharded_plan_of_schema_3() -> None:
    plan = parse_plan(SHARDED)
    assert (plan.layout.kind, plan.layout.states, plan.schema) == ("shard", (0.25, 0.75), 3)
    for form in (to_toml, to_json):
        assert parse_plan(form(plan)) == plan
        assert b"state" not in form(example())
    assert to_toml(plan).startswith(b"schema = 3\n")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (b"0.75", b"0.7", "layout.share has the states 0.25, 0.7"),
        (b"0.75", b"nan", "layout.share has the states 0.25, nan"),
        (b"state = 0.75", b"", "layout.share has the states 0.25, 0.0"),
        (b"\n[[", b'\n[layout]\nkind = "split"\n[[', "layout.kind is split"),
    ],
)
def test_parts_of_state_that_are_no_whole_are_named(
    before: bytes, after: bytes, named: str
) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(SHARDED.replace(before, after, 1))
    assert named in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("value", [b"inf", b"-inf", b"nan"])
def test_no_number_of_a_plan_is_infinite(value: bytes) -> None:
    """TOML has such numbers, and JSON doesn't: a plan would differ by its format."""
    text = to_toml(example()).replace(b"high = 101.0", b"high = 101.0\nactive_watts = " + value)
    assert value in text
    with pytest.raises(PlanError, match="active_watts"):
        parse_plan(text)


def test_a_device_may_hold_state_without_rows() -> None:
    """A device without rows takes part in training and holds state."""
    third = b'\n[[layout.share]]\ndevice = "cpu-2-of-3"\nbatch = 0\nstate = 0.5\n'
    text = SHARDED.replace(b"0.25", b"0.2").replace(b"0.75", b"0.3") + third
    plan = parse_plan(text)
    assert [share.batch for share in plan.layout.active] == [*parse_plan(SHARDED).batches, 0]
    assert parse_plan(to_toml(plan)).layout == plan.layout
    assert plan.shares(7 * plan.layout.global_batch)[2] == 0
    left = leave_out(plan, {("", plan.layout.share[0].device)})
    assert left.batches == (0, plan.layout.global_batch, 0)
    assert left.layout.states == pytest.approx((3 / 8, 5 / 8))
    with pytest.raises(PlanError, match="compute no rows"):
        leave_out(two_without_rows(plan), {("", plan.layout.share[0].device)})


def two_without_rows(plan: Plan) -> Plan:
    """Return the plan with all rows on its first device."""
    rows = (plan.layout.global_batch, 0, 0)
    return msgspec.structs.replace(plan, layout=make_layout("shard", plan.layout.share, rows))


def test_a_sharded_plan_without_a_device_shares_its_state_out_unless_one_is_left() -> None:
    third = b'\n[[layout.share]]\ndevice = "cpu-2-of-3"\nbatch = 2\nstate = 0.5\n'
    plan = parse_plan(SHARDED.replace(b"0.75", b"0.25") + third)
    left = leave_out(plan, [("", "cpu-0-of-2")])
    assert left.layout.states == pytest.approx((1 / 3, 2 / 3))
    assert parse_plan(to_toml(left)) == left
    with pytest.raises(PlanError, match="alone is left"):
        leave_out(plan, [("", "cpu-0-of-2"), ("", "cpu-1-of-2")])


def in_passes(*micros: int) -> PlanLayout:
    """Return the example's layout with passes of these sizes."""
    layout = example().layout
    return make_layout(layout.kind, layout.share, layout.batches, micros=micros)


def test_a_plan_of_schema_1_is_read_as_one_pass_each_and_written_as_schema_2() -> None:
    """Old plans are upgraded, also those in journals, which hold them in decoded form."""
    assert to_toml(example()).startswith(
        b"schema = 2\n"
    )  # older versions refuse the file because of it
    for form in (to_toml, to_json):
        old = (
            form(example())
            .replace(b"schema = 2", b"schema = 1")
            .replace(b'"schema": 2', b'"schema": 1')
        )
        old = re.sub(rb',?\s*"?micro"?( =|:) \d+', b"", old)
        assert b"micro" not in old
        assert parse_plan(old) == example()
        assert form(parse_plan(old)) == form(example())
    journalled = msgspec.convert(msgspec.json.decode(old), Plan)
    assert journalled.schema == 1
    assert to_json(journalled) == to_json(example())


@pytest.mark.parametrize(("batch", "micros"), [(80, (1, 0, 20)), (160, (1, 0, 40)), (8, (1, 0, 2))])
def test_what_one_pass_does_stays_one_at_any_batch_and_passes_keep_their_rows(
    batch: int, micros: tuple[int, ...]
) -> None:
    plan = msgspec.structs.replace(example(), layout=in_passes(1, 0, 20))
    assert plan.micros(batch) == micros
    rough = msgspec.structs.replace(example(), layout=in_passes(30, 0, 20))
    assert (
        rough.micros(batch) == tuple(min(30, each) for each in rough.shares(batch)[:1]) + micros[1:]
    )


def test_hosts_are_written_where_a_plan_has_them() -> None:
    hosts = iter(("one", "one", "two"))
    shares = tuple(
        msgspec.structs.replace(share, host=next(hosts)) for share in example().layout.share
    )
    layout = msgspec.structs.replace(example().layout, share=shares)
    plan = msgspec.structs.replace(example(), layout=layout)
    for form in (to_toml, to_json):
        assert b"host" not in form(example())
        assert parse_plan(form(plan)) == plan
    partly = msgspec.structs.replace(layout, share=(example().layout.share[0], *shares[1:]))
    with pytest.raises(PlanError, match="some of its devices on a host"):
        parse_plan(to_json(msgspec.structs.replace(plan, layout=partly)))


def with_curves() -> Plan:
    """Return the example with everything that training needs to change its shares."""
    curve = ((0.0, 0.001), (80.0, 0.0123))
    shares = tuple(
        msgspec.structs.replace(share, curve=curve, most=70) if share.batch else share
        for share in example().layout.share
    )
    return msgspec.structs.replace(
        example(), layout=msgspec.structs.replace(example().layout, share=shares)
    )


def test_curves_are_written_on_short_lines_and_only_where_there_are_any() -> None:
    for form in (to_toml, to_json):
        assert b"curve" not in form(example())
        assert parse_plan(form(with_curves())) == with_curves()
    assert b"curve = [\n    [0.0, 0.001],\n    [80.0, 0.0123],\n]\nmost = 70\n" in to_toml(
        with_curves()
    )


def by_cost() -> Plan:
    """Return the example with shares of the cost.

    The last device is slower, so its part of the cost is smaller than its part of the rows.
    """
    shares = tuple(
        msgspec.structs.replace(
            share, cost=Cost(0.002, 1e-6 * (1 + index), 1e-9), tokens=4096 * index
        )
        for index, share in enumerate(example().layout.share)
    )
    layout = make_layout("split", shares, (60, 0, 20), ratios=(0.8, 0.0, 0.2))
    return msgspec.structs.replace(example(), layout=layout)


def test_shares_of_cost_are_written_only_where_there_are_any() -> None:
    for form in (to_toml, to_json):
        assert b"cost" not in form(example())
        assert b"tokens" not in form(example())
        assert parse_plan(form(by_cost())) == by_cost()
        assert form(by_cost()).count(b"tokens") == 2  # the first device has no known limit
    assert by_cost().shares() == (64, 0, 16)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("layout.share.0.cost", None, "share[0] has no cost, and others have one"),
        ("layout.share.2.cost.fixed_s", -1.0, "share[2].cost"),
        ("layout.share.1.cost.per_token_s", math.nan, "share[1].cost"),
        (
            "layout.share.0.cost",
            {"fixed_s": 0, "per_token_s": 0, "per_token_length_s": 0},
            "share[0].cost",
        ),
        ("layout.share.0.cost", {"fixed_s": 1}, "per_token_s"),
        ("layout.share.0.ratio", 0.9, "ratios that sum to 1.1"),
        ("layout.share.0.ratio", 0, "share[0].ratio"),
        ("layout.share.0.ratio", math.nan, "share[0].ratio"),
        ("layout.share.1.ratio", 0.2, "share[1].ratio"),
        ("layout.share.2.tokens", -1, "share[2].tokens"),
    ],
)
def test_a_wrong_cost_is_named(path: str, value: Any, named: str) -> None:
    data = msgspec.json.decode(to_json(by_cost()))
    put(data, path, value)
    if value is None:
        del data["layout"]["share"][0]["cost"]
    with pytest.raises(PlanError) as caught:
        parse_plan(tomli_w.dumps(data).encode())
    assert named in caught.value.message


def put(data: Any, path: str, value: Any) -> None:
    *way, last = path.split(".")
    for key in way:
        data = data[int(key)] if isinstance(data, (list, tuple)) else data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("surprise", 1, "surprise"),
        ("layout.surprise", 1, "surprise"),
        ("layout.share.0.surprise", 1, "surprise"),
        ("schema", SCHEMA + 1, f"schema {SCHEMA + 1}"),
        ("schema", 0, "schema"),
        ("schema", True, "schema"),
        ("schema", "1", "schema"),
        ("schema", None, "schema"),
        ("layout.share.0.ratio", 0.7, "share[0].ratio"),
        ("layout.share.0.ratio", math.nan, "share[0].ratio"),
        ("layout.share.0.ratio", math.inf, "share[0].ratio"),
        ("layout.share.0.batch", 61, "global_batch"),
        ("layout.share.0.batch", -60, ">= 0 - at `$.layout.share[0].batch"),
        ("layout.share.0.batch", 60.5, "batch"),
        ("layout.share.0.batch", "60", "batch"),
        ("layout.share.0.batch", 0, "split"),
        ("layout.share.0.micro", 61, "share[0].micro is 61, but its batch is 60"),
        ("layout.share.0.micro", 0, "share[0].micro"),
        ("layout.share.0.micro", -1, "share[0].micro"),
        ("layout.share.0.micro", 30.5, "micro"),
        ("layout.share.0.micro", True, "micro"),
        ("layout.share.1.micro", 1, "share[1].micro"),
        ("layout.share.0.curve", [[0, 0.1]], "share[0].curve"),
        ("layout.share.0.curve", [[0, 0.1], [0, 0.2]], "share[0].curve"),
        ("layout.share.0.curve", [[0, 0.1], [9, 0.05]], "share[0].curve"),
        ("layout.share.0.curve", [[0, 0.0], [9, 0.0]], "share[0].curve"),
        ("layout.share.0.curve", [[-1, 0.1], [9, 0.2]], "share[0].curve"),
        ("layout.share.0.curve", [[0, 0.1], [9, math.nan]], "share[0].curve"),
        ("layout.share.2.most", -1, "share[2].most"),
        ("layout.share.2.held_bytes", -1, "share[2].held_bytes"),
        ("layout.global_batch", 10**30, "global_batch"),
        ("layout.kind", "solo", "solo"),
        ("layout.kind", "spilt", "spilt"),
        ("layout.processes", 0, "processes"),
        ("layout.engine", "warp", "engine is warp"),
        ("layout.share.1.index", 0, "the index 0 twice"),
        ("layout.share.1.device", "GPU-0", "the device GPU-0 twice"),
        ("layout.share", [], "share"),
        ("throughput.low", 200.0, "throughput"),
        ("throughput.high", math.nan, "throughput"),
        ("throughput.low", -1.0, "throughput"),
        ("search.seconds", math.nan, "search"),
        ("search.probes", -1, "search"),
        ("xla", "no", "xla"),
        ("warnings", ["x", 1], "warnings"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: Any, named: str) -> None:
    data = msgspec.json.decode(to_json(example()))
    put(data, path, value)
    texts = [msgspec.json.encode(data)]
    if value is not None:
        texts.append(tomli_w.dumps(msgspec.to_builtins(data)).encode())
    if isinstance(value, float) and not math.isfinite(value):
        texts.pop(0)  # JSON has no such number
    for text in texts:
        with pytest.raises(PlanError) as caught:
            parse_plan(text, "my.toml")
        assert named in caught.value.message
        assert caught.value.message.startswith("my.toml")
        assert caught.value.remedy


@pytest.mark.parametrize("key", ["device", "batch"])
def test_a_missing_key_is_named(key: str) -> None:
    """In a plan by evener any key may be missing, in one by hand only the required two."""
    data = msgspec.to_builtins(example())
    del data["layout"]["share"][1][key]
    by_hand = {"layout": {"share": [{"device": "cpu-0-of-1", "batch": 1}]}}
    del by_hand["layout"]["share"][0][key]
    for plan in (data, by_hand):
        with pytest.raises(PlanError, match=f"required field `{key}` - at .*share"):
            parse_plan(msgspec.json.encode(plan))


def test_a_plan_without_shares_says_so() -> None:
    for text in (b"", b"{}", b"[layout]"):
        with pytest.raises(PlanError, match=r"layout\.share gives no device a sample"):
            parse_plan(text)


def documented() -> list[str]:
    """Return the plans of docs/plan.md: the shortest, the one for training, and one in shards."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text()
    return [
        text
        for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        if "[[layout.share]]" in text
    ]


def test_a_plan_by_hand_needs_its_devices_and_batches_only(tmp_path: Path) -> None:
    """Other values follow from these or stay unknown; the plan is written in full and read back."""
    text, *_ = documented()
    plan = parse_plan(text.encode())
    assert (plan.layout.kind, plan.layout.global_batch, plan.batches) == ("split", 8, (6, 2))
    assert plan.ratios == (0.75, 0.25)
    assert plan.micros() == plan.batches
    assert [(share.index, share.name) for share in plan.layout.share] == [
        (0, "cpu-0-of-2"),
        (1, "cpu-1-of-2"),
    ]
    assert parse_plan(to_toml(plan)) == parse_plan(to_json(plan)) == plan
    for framework in ("torch", "tensorflow"):
        assert (
            check_fit(
                plan, devices=None, world=2, workload_digest="ab", strict=True, framework=framework
            )
            == ()
        )


def test_the_plan_of_the_page_is_one_and_the_page_has_every_key() -> None:
    _, text, sharded = documented()
    assert parse_plan(sharded.encode()).layout.states == (0.79, 0.21)
    assert parse_plan(text.encode()).micros() == (410, 568)
    page = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text()
    keys = {
        key
        for each in (Plan, PlanLayout, Share, Evidence, Fingerprint, SearchSummary)
        for key in each.__struct_fields__
    }
    keys -= {"out_of_memory"}  # in words
    assert {key for key in keys if f"{key}" not in page} == set()


@given(st.data())
def test_fields_that_a_plan_leaves_out_have_their_defaults(data: st.DataObject) -> None:
    """The defaults are those of a plan with one pass per device, in the order of its devices."""
    batches = data.draw(st.lists(st.integers(0, 4096), min_size=1, max_size=5).filter(any))
    written = msgspec.to_builtins(example(tuple(batches)))
    shares = written["layout"]["share"]
    for share in shares:
        share["name"] = share["device"]
    whole = parse_plan(msgspec.json.encode(written))
    for part, keys in (
        (written["layout"], ("kind", "global_batch")),
        *((share, ("index", "name", "ratio", "micro")) for share in shares),
    ):
        for key in data.draw(st.sets(st.sampled_from(keys))):
            del part[key]
    assert parse_plan(msgspec.json.encode(written)) == whole


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"a = " + b"[" * 100_000,
        b'{"schema":1,"x":1e999}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_absurd_nesting_and_numbers_are_a_one_line_error(text: bytes) -> None:
    with pytest.raises(PlanError):
        parse_plan(text)


def test_files_that_are_no_plan_are_a_one_line_error(tmp_path: Path) -> None:
    """The cases are a folder, no file, an endless device, an invalid name and a huge file."""
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (5 << 20))
    for path in (tmp_path, tmp_path / "none.toml", Path("/dev/zero"), "a\0b", large):
        with pytest.raises(PlanError) as caught:
            load_plan(path)
        assert caught.value.remedy


def test_a_plan_is_read_from_a_pipe(tmp_path: Path) -> None:
    code = "import sys, evener; print(evener.load_plan('/dev/stdin').batches)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=to_toml(example()), capture_output=True, check=True
    )
    assert done.stdout.strip() == b"(60, 0, 20)"


def test_save_chooses_the_form_by_the_name(tmp_path: Path) -> None:
    example().save(tmp_path / "plan.toml")
    example().save(tmp_path / "plan.json")
    example().save(tmp_path / "plan.txt", "json")
    assert (tmp_path / "plan.toml").read_bytes() == to_toml(example())
    assert (
        (tmp_path / "plan.json").read_bytes()
        == (tmp_path / "plan.txt").read_bytes()
        == to_json(example())
    )
    assert {load_plan(path).batches for path in tmp_path.iterdir()} == {(60, 0, 20)}


def test_bytes_of_a_file_name_that_are_no_text_do_not_lose_the_plan(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(example(), workload="tr\udcffain.py:build")
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert load_plan(tmp_path / name).workload == "tr?ain.py:build"


def test_shares_of_another_global_batch_keep_the_proportions() -> None:
    assert example().shares() == (60, 0, 20)
    assert example().shares(8) == (6, 0, 2)
    assert example().shares(2) == (1, 0, 1)


def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    before = os.umask(0o027)
    try:
        example().save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o600)
    example((1, 1)).save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_plan(path).batches == (1, 1)


def test_a_link_stays_a_link_and_a_device_stays_a_device(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "link.toml"
    link.symlink_to(real)
    example().save(link)
    assert link.is_symlink()
    assert load_plan(real) == example()
    example().save("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def disk_full(path: Path, content: bytes) -> None:
    """Write with a file size limit, which fails like a full disk."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from evener.system.files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "from evener.errors import RequestError\n"
        "try: write_atomically(Path(sys.argv[1]), b'x' * 100)\n"
        "except RequestError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    if "can't be written" in done.stdout:
        raise RequestError(done.stdout)


def no_folder(path: Path, content: bytes) -> None:
    write_atomically(path / "below a file", content)


def read_only(path: Path, content: bytes) -> None:
    write_atomically(Path("/proc/plan.toml"), content)


@pytest.mark.parametrize("fault", [disk_full, no_folder, read_only])
def test_a_write_that_fails_keeps_the_earlier_file(
    tmp_path: Path, fault: Callable[[Path, bytes], None]
) -> None:
    path = tmp_path / "plan.toml"
    example().save(path)
    with pytest.raises(RequestError, match="can't be written"):
        fault(path, to_toml(example((1, 1))))
    assert path.read_bytes() == to_toml(example())
    assert list(tmp_path.iterdir()) == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_impossible_names_are_a_one_line_error(tmp_path: Path) -> None:
    for path in (tmp_path, "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(RequestError):
            example().save(path)


def fit(plan: Plan, **changes: Any) -> tuple[str, ...]:
    arguments: dict[str, Any] = {
        "devices": ("GPU-0", "GPU-1", "GPU-2"),
        "world": 2,
        "workload_digest": "ab12",
        "strict": False,
    }
    return check_fit(plan, **{**arguments, **changes})


def test_a_plan_that_fits_has_no_warning() -> None:
    assert fit(example(), strict=True) == ()
    # the middle device was left out anyway
    assert fit(example(), devices=("GPU-0", "GPU-2"), strict=True) == ()
    assert fit(example(), devices=None, world=None, workload_digest=None, strict=True) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"devices": ("GPU-0", "GPU-7")}, "GPU-2"),
        ({"devices": ()}, "none"),
        ({"workload_digest": "cd34"}, "cd34"),
    ],
)
def test_another_machine_or_model_is_a_warning_and_strict_an_error(
    changes: dict[str, Any], named: str
) -> None:
    (warning,) = fit(example(), **changes)
    assert named in warning
    with pytest.raises(PlanError) as caught:
        fit(example(), strict=True, **changes)
    assert named in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize("world", [1, 3])
def test_a_wrong_world_is_an_error_that_names_both_numbers(world: int) -> None:
    with pytest.raises(PlanError) as caught:
        fit(example(), world=world)
    assert f"has {world}" in caught.value.message
    assert "on 2" in caught.value.message
    assert "(1 of its devices is left out)" in caught.value.message
    assert "Start 2, as evener launch does" in caught.value.remedy


@pytest.mark.parametrize("batch", [1, 0, -4, 2.0, True])
def test_a_global_batch_below_the_devices_is_an_error_that_names_it(batch: Any) -> None:
    with pytest.raises(PlanError) as caught:
        fit(example(), global_batch=batch)
    assert repr(batch) in caught.value.message


def test_evidence_on_other_devices_than_the_plan_s_is_refused() -> None:
    """Rivals are shown with the names of the plan's devices."""
    throughput = Throughput(10.0, 9.0, 11.0)
    plan = msgspec.structs.replace(
        example(), evidence=(Evidence("equal shares", example((40, 40)).layout, throughput),)
    )
    with pytest.raises(
        PlanError, match=r"evidence\[0\].layout.share names 2 devices, and layout.share 3"
    ):
        parse_plan(to_json(plan))
