"""What `--devices` selects, in every form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.devices.backend import Discovery, visible_devices
from evener.devices.discover import discover
from evener.devices.terms import parse_request, write_limit
from evener.devices.types import Device, Limit, Term
from evener.errors import DeviceError, RequestError

GIB = 1 << 30
EMPTY: dict[str, str] = {}


def ids(found: Discovery) -> list[str]:
    """Return the labels of the devices."""
    return [device.label for device in found.devices]


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process use four logical CPUs without known siblings."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4000, 4001, 4002, 4003})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gpu", (Term("gpu"),)),
        ("GPU:0", (Term("gpu", "0"),)),
        ("gpu:0,2", (Term("gpu", "0"), Term("gpu", "2"))),
        ("gpu:0, gpu:1@60%", (Term("gpu", "0"), Term("gpu", "1", Limit(60.0)))),
        ("gpu:1@60%+8GiB", (Term("gpu", "1", Limit(60.0, 8 * GIB)),)),
        ("GPU-8a,MIG-7b@1GiB", (Term("gpu", "GPU-8a"), Term("gpu", "MIG-7b", Limit(None, GIB)))),
        ("gpu:GPU-8a,3", (Term("gpu", "GPU-8a"), Term("gpu", "3"))),
        ("cpu@60%", (Term("cpu", "", Limit(60.0)),)),
        ("cpu/4:0,1@60%", (Term("cpu", "0", slices=4), Term("cpu", "1", Limit(60.0), 4))),
        ("cpu:0@100%,cpu:1@60%", (Term("cpu", "0", Limit(100.0)), Term("cpu", "1", Limit(60.0)))),
        ("sim:gtx1080ti,gtx1080", (Term("sim", "gtx1080ti"), Term("sim", "gtx1080"))),
        ("sim:a@b.toml", (Term("sim", "a@b.toml"),)),
        ("auto", (Term("auto"),)),
        ("ray", (Term("auto", host=""),)),
        ("ray@60%", (Term("auto", limit=Limit(60.0), host=""),)),
        ("ray/cpu/1", (Term("cpu", slices=1, host=""),)),
        ("ray:a,ray:10.0.0.2", (Term("auto", host="a"), Term("auto", host="10.0.0.2"))),
        (
            "ray:a/gpu:0,2@8GiB,GPU-8a,RAY:b/gpu",
            (
                Term("gpu", "0", host="a"),
                Term("gpu", "2", Limit(None, 8 * GIB), host="a"),
                Term("gpu", "GPU-8a", host="a"),
                Term("gpu", host="b"),
            ),
        ),
    ],
)
def test_every_form_of_the_contract_parses(spec: str, expected: tuple[Term, ...]) -> None:
    assert parse_request(spec) == expected


@pytest.mark.parametrize(
    "spec",
    [
        *(
            "",
            ",",
            "gpu,",
            ",gpu",
            "tpu",
            "gpu:",
            "gpu:,1",
            "sim",
            "sim:",
            "auto:1",
            "ray:",
            "ray:/gpu",
            "ray:a/",
            "ray:a/tpu",
            "ray:a/sim:t4",
            "ray:a/gpu:",
            "ray,ray:a",
            "ray:a,ray:a",
            "ray:a,gpu:0",
            "gpu:0,ray:a/gpu:1",
            "ray:a/gpu:0,ray:b/cpu:0",
            "auto,gpu",
            "gpu,auto",
            "auto,auto",
        ),
        *(
            "gpu/2",
            "cpu/",
            "cpu/x",
            "cpu/2/3",
            "gpu,1",
            "1",
            "cpu,sim:t4",
            "gpu:0,cpu:1",
            "gpu@",
            "gpu@@60%",
            "@60%",
        ),
        *("cpu:0@60", "gpu 0", "cpu:0\n,\x1b[31m"),
    ],
)
def test_a_malformed_request_is_a_one_line_error_with_a_remedy(spec: str) -> None:
    with pytest.raises(RequestError) as caught:
        discover(spec, environ=EMPTY)
    assert caught.value.remedy
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("gpu:0+8GiB", "gpu:0@8GiB"),
        ("gpu:0+60%+8GiB", "gpu:0@60%+8GiB"),
        ("cpu/4:0,1 60%", "1@60%"),
        ("ray:a/gpu:0 + 8GiB", "ray:a/gpu:0@8GiB"),
        ("sim:t4,t4+1.5GB", "t4@1.5GB"),
    ],
)
def test_a_limit_without_an_at_says_where_it_stands(spec: str, remedy: str) -> None:
    with pytest.raises(RequestError, match="a limit without an @") as caught:
        parse_request(spec)
    assert caught.value.remedy == f"Write {remedy}."
    assert parse_request("sim:./a+8gib")[0].pick == "./a+8gib"


TERMS = st.builds(
    Term,
    st.just("cpu"),
    st.integers(0, 63).map(str) | st.just(""),
    st.builds(
        Limit, st.none() | st.integers(1, 100).map(float), st.none() | st.integers(1, 1 << 50)
    ),
    st.none() | st.integers(1, 99),
)


@given(st.lists(TERMS, min_size=1, max_size=6))
def test_a_request_parses_to_the_terms_that_it_was_written_from(terms: list[Term]) -> None:
    written = [
        "cpu"
        + (f"/{term.slices}" if term.slices else "")
        + (f":{term.pick}" if term.pick else "")
        + (f"@{write_limit(term.limit)}" if term.limit else "")
        for term in terms
    ]
    assert parse_request(",".join(written)) == tuple(terms)


@given(st.text(alphabet="gpucsim:auto,/@%0123GiB-+. t4", max_size=30))
def test_any_text_is_a_request_or_a_request_error(spec: str) -> None:
    try:
        terms = parse_request(spec)
    except RequestError:
        return
    assert len({term.kind for term in terms}) == 1


def test_slices_are_picked_and_limited_in_the_order_of_the_request(four_cores: None) -> None:
    found = discover("cpu/4:3,1@60%+1GiB", environ=EMPTY)
    assert [device.id for device in found.devices] == ["cpu-3-of-4", "cpu-1-of-4"]
    assert [device.cores for device in found.devices] == [(4003,), (4001,)]
    assert [device.limit for device in found.devices] == [Limit(), Limit(60.0, GIB)]
    assert found.notes == ()


def test_two_slices_by_default_and_spare_cpus_are_reported(four_cores: None) -> None:
    assert [device.cores for device in discover("cpu", environ=EMPTY).devices] == [
        (4000, 4001),
        (4002, 4003),
    ]
    assert "1 of 4 logical CPUs" in discover("cpu/3", environ=EMPTY).notes[0]


@pytest.mark.parametrize(
    "spec",
    ["cpu:2", "cpu/4:4", "cpu/5", "cpu:0,0", "cpu,cpu:1", "cpu/2:0,cpu/4:1", "cpu:x", "cpu/0"],
)
def test_slices_that_are_not_there_or_named_twice_are_refused(four_cores: None, spec: str) -> None:
    with pytest.raises(RequestError):
        discover(spec, environ=EMPTY)


def test_simulated_devices_carry_their_machine_and_limits() -> None:
    found = discover("sim:gtx1080ti,gtx1080@50%+4GiB", environ=EMPTY)
    assert found.machine is not None
    assert found.devices == found.machine.described()
    assert found.machine.limits == (Limit(), Limit(50.0, 4 * GIB))
    alone = discover("sim:gtx1080", environ=EMPTY).machine
    assert alone is not None
    assert found.machine.device_seconds(1, 100, False) == pytest.approx(
        2 * alone.device_seconds(0, 100, False)
    )
    assert ids(discover("sim:t4,t4", environ=EMPTY)) == ["SIM:0", "SIM:1"]


def test_a_machine_file_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    table = (
        '[[device]]\nname = "A"\nmemory_mib = 9\nmemory_base_mib = 0\nmemory_per_sample_mib = 1\n'
    )
    path.write_text((table + "curve = [[1, 1], [2, 2]]\n") * 2)
    assert ids(discover(f"sim:{path}", environ=EMPTY)) == ["SIM:0", "SIM:1"]
    with pytest.raises(RequestError, match="combined with other devices"):
        discover(f"sim:{path},t4", environ=EMPTY)
    with pytest.raises(RequestError, match="can't be read"):
        discover("sim:nowhere.toml", environ=EMPTY)


def test_gpus_by_index_uuid_and_beginning_of_a_uuid(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=3)
    assert ids(discover("gpu", environ=EMPTY)) == ["GPU:0", "GPU:1", "GPU:2"]
    assert ids(discover("gpu:2,0", environ=EMPTY)) == ["GPU:2", "GPU:0"]
    assert ids(discover(f"{nvml.gpus[1].uuid},gpu-00000002", environ=EMPTY)) == ["GPU:1", "GPU:2"]
    found = discover("gpu:0,gpu:1@60%+8GiB", environ=EMPTY)
    assert [device.usable_memory_bytes for device in found.devices] == [140 * GIB, 8 * GIB]
    assert found.devices[0].id == nvml.gpus[0].uuid
    assert nvml.open == 0


@pytest.mark.parametrize(
    "spec",
    [
        "gpu:3",
        "gpu:GPU-f",
        "gpu:nonsense",
        "gpu:0,0",
        "gpu,gpu:1",
        "gpu:GPU-0",
        "gpu:0,GPU-00000000",
    ],
)
def test_gpus_that_are_not_there_ambiguous_or_named_twice_are_refused(
    fake_nvml: Callable[..., Any], spec: str
) -> None:
    fake_nvml(gpus=3)
    with pytest.raises(RequestError) as caught:
        discover(spec, environ=EMPTY)
    assert caught.value.remedy


def test_a_gpu_that_is_not_there_is_answered_with_those_that_are(
    fake_nvml: Callable[..., Any],
) -> None:
    fake_nvml(gpus=1)
    with pytest.raises(RequestError, match=r"no GPU '7'") as caught:
        discover("gpu:7", environ=EMPTY)
    assert "0 (NVIDIA H200, GPU-00000000" in caught.value.remedy


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("1", ["GPU:1"]),
        ("2,0", ["GPU:2", "GPU:0"]),
        ("GPU-00000001", ["GPU:1"]),
        ("0,9,1", ["GPU:0"]),
        ("0,GPU-0", ["GPU:0"]),
    ],
)
def test_gpu_and_auto_keep_to_cuda_visible_devices(
    fake_nvml: Callable[..., Any], variable: str, expected: list[str]
) -> None:
    fake_nvml(gpus=3)
    for spec in ("gpu", "auto"):
        assert ids(discover(spec, environ={"CUDA_VISIBLE_DEVICES": variable})) == expected
    assert (
        len(discover("gpu", only_visible=False, environ={"CUDA_VISIBLE_DEVICES": variable}).devices)
        == 3
    )
    assert ids(discover("gpu:2", environ={"CUDA_VISIBLE_DEVICES": variable})) == ["GPU:2"]


def test_indices_of_unequal_gpus_are_reported_to_follow_the_drivers_order(
    fake_nvml: Callable[..., Any],
) -> None:
    """CUDA counts the fastest first by default, so `1` may be another card there."""
    nvml = fake_nvml(gpus=2)
    variables = {"CUDA_VISIBLE_DEVICES": "1"}
    assert discover("gpu", environ=variables).notes == ()
    nvml.gpus[1].name = "GTX 1080"
    assert "PCI_BUS_ID" in discover("gpu", environ=variables).notes[0]
    assert discover("gpu", environ=variables | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes == ()
    assert discover("gpu", environ={"CUDA_VISIBLE_DEVICES": nvml.gpus[1].uuid}).notes == ()


@pytest.mark.parametrize("variable", ["", "-1", "none", "0,0"])
def test_hidden_gpus_are_a_device_error_for_gpu_and_the_cpu_for_auto(
    fake_nvml: Callable[..., Any], variable: str
) -> None:
    fake_nvml(gpus=2)
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        discover("gpu", environ={"CUDA_VISIBLE_DEVICES": variable})
    found = discover("auto", environ={"CUDA_VISIBLE_DEVICES": variable})
    assert found.devices[0].kind == "cpu"
    assert "CUDA_VISIBLE_DEVICES" in found.notes[0]


@given(st.lists(st.integers(0, 5), max_size=6))
def test_visible_gpus_are_those_named_up_to_the_first_that_is_not_there(numbers: list[int]) -> None:
    gpus = tuple(Device(f"GPU-{i}", i, "X", "gpu", None) for i in range(4))
    seen = [device.index for device in visible_devices(gpus, ",".join(map(str, numbers)))]
    known = numbers[: next((at for at, number in enumerate(numbers) if number > 3), len(numbers))]
    assert seen == (known if len(set(known)) == len(known) else [])


@pytest.mark.parametrize(
    "code_name", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "UNKNOWN"]
)
def test_driver_trouble_is_a_device_error_for_gpu_and_a_note_for_auto(
    fake_nvml: Callable[..., Any], code_name: str
) -> None:
    nvml = fake_nvml()
    nvml.unload(getattr(nvml, f"NVML_ERROR_{code_name}"))
    with pytest.raises(DeviceError) as caught:
        discover("gpu", environ=EMPTY)
    assert caught.value.exit_code == 3
    assert caught.value.remedy
    found = discover("auto", environ=EMPTY)
    assert found.devices[0].kind == "cpu"
    assert caught.value.message in found.notes[0]


def test_auto_takes_the_gpus_where_there_are_some(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(gpus=2)
    assert ids(discover("auto@50%", environ=EMPTY)) == ["GPU:0", "GPU:1"]


def test_a_driver_without_gpus_is_a_device_error(fake_nvml: Callable[..., Any]) -> None:
    fake_nvml(gpus=0)
    with pytest.raises(DeviceError, match="no GPU"):
        discover("gpu", environ=EMPTY)


def test_a_gpu_that_does_not_answer_is_left_out_and_reported(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=2)
    nvml.lose(0)
    found = discover("gpu", environ=EMPTY)
    assert ids(found) == ["GPU:1"]
    assert found.notes == ("GPU:0 does not answer: GPU is lost.",)


def test_memory_that_others_hold_is_reported(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=2)
    nvml.gpus[1].used_bytes = 70 * GIB
    assert discover("gpu", environ=EMPTY).notes == (
        "GPU:1 has 70.0 of 140.0 GiB in use by others.",
    )


def test_the_memory_of_a_chip_that_shares_the_machines_is_unknown(
    fake_nvml: Callable[..., Any],
) -> None:
    nvml = fake_nvml(gpus=1)
    nvml.fail("nvmlDeviceGetMemoryInfo_v2", nvml.NVML_ERROR_NOT_SUPPORTED)
    assert discover("gpu", environ=EMPTY).devices[0].memory_bytes is None


def test_a_gpu_in_mig_mode_is_its_instances(fake_nvml: Callable[..., Any]) -> None:
    nvml = fake_nvml(gpus=2)
    instance = type(nvml.gpus[0])
    nvml.gpus[0].instances = [
        instance(f"MIG-{i}", "NVIDIA H200 MIG 1g.18gb", 18 * GIB) for i in range(2)
    ]
    found = discover("gpu", environ=EMPTY)
    assert [(device.index, device.id[:3]) for device in found.devices] == [
        (1, "GPU"),
        (2, "MIG"),
        (3, "MIG"),
    ]
    assert discover("MIG-1", environ=EMPTY).devices[0].memory_bytes == 17 * GIB


def test_a_simulated_request_loads_no_driver_binding_and_no_framework() -> None:
    code = (
        "import sys\nfrom evener.devices.discover import discover\ndiscover('sim:t4,t4')\n"
        "print(sorted({'pynvml', 'psutil', 'tensorflow', 'torch', 'textual'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
