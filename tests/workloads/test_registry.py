"""The registry of workloads: names, settings, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.errors import RequestError
from evener.workloads import registry, user_code
from evener.workloads.protocol import WorkerSetup


def test_every_entry_is_found_under_its_framework() -> None:
    """Each registered name resolves to itself, with and without its framework."""
    for name in registry.names():
        entry = registry.find(name)
        assert entry.name == name
        assert registry.find(name, "" if entry.framework == "none" else entry.framework) is entry


@pytest.mark.parametrize(
    ("framework", "on_cpu", "name"),
    [
        ("tensorflow", False, "keras_maxer"),
        ("tensorflow", True, "keras_mnist"),
        ("torch", False, "torch_maxer"),
        ("torch", True, "torch_mnist"),
    ],
)
def test_default_name(framework: str, on_cpu: bool, name: str) -> None:
    """Each framework has a default for GPUs and one for CPU slices."""
    assert registry.default_name(framework, on_cpu) == name


def test_an_unknown_name_lists_the_known_ones_close_matches_first() -> None:
    """The hint starts with the closest names."""
    with pytest.raises(RequestError) as caught:
        registry.find("keras_mnits")
    assert "keras_mnits" in caught.value.message
    assert caught.value.remedy.startswith("Known: keras_mnist")
    assert "synthetic" in caught.value.remedy


def test_a_workload_of_another_framework_names_its_twin() -> None:
    """For keras_gru with torch, the hint starts with torch_gru."""
    with pytest.raises(RequestError, match="keras_gru is a tensorflow workload") as caught:
        registry.find("keras_gru", "torch")
    assert caught.value.remedy.startswith("Known: torch_gru")


def test_settings_take_the_type_of_their_default() -> None:
    """Text from the command line is converted to the type of the default."""
    settings = registry.resolve_settings(
        registry.find("keras_mnist"), {"filters": "8", "learning_rate": "0.1"}
    )
    assert settings == {"filters": 8, "dense": 64, "learning_rate": 0.1}


@pytest.mark.parametrize("given", [{"filter": 3}, {"filters": "many"}, {"filters": "1.5"}])
def test_a_wrong_setting_is_named(given: dict[str, str]) -> None:
    """An unknown setting or a wrong type is refused, with the valid settings in the hint."""
    with pytest.raises(RequestError, match="filter") as caught:
        registry.resolve_settings(registry.find("keras_mnist"), given)
    assert caught.value.remedy


def test_build_makes_the_workload() -> None:
    """The registry builds the workload of a name."""
    workload = registry.build("synthetic", WorkerSetup(("CPU:0",)), {"base_ms": 0.1})
    workload.prepare((4,))
    workload.step()
    workload.synchronize()
    assert workload.facts()["engine"] == "barrier"


def test_own_file_is_parsed_not_run(tmp_path: Path) -> None:
    """Resolving a user's file doesn't run it."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('was run')\ndef build():\n    return None\n")
    entry = registry.find(f"{script}:build", "torch")
    assert entry.framework == "torch"
    assert entry.source == str(script)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (None, "train.py:build", "no file train.py"),
        (None, "train.py", "no file train.py. Check the path, and write it as train.py:FUNCTION"),
        (None, "./train", "no file train"),
        ("def build(:\n", "train.py", "train.py:1: SyntaxError: invalid syntax."),
        ("def make():\n    pass\n", "train.py:build", "no function 'build'"),
        ("def build(:\n", "train.py:build", "train.py:1: SyntaxError: invalid syntax."),
        ("", "train.py:", "doesn't name a function"),
        ("", "not a module:build", "neither"),
    ],
)
def test_own_names_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str, says: str
) -> None:
    """A missing file, a missing function or a syntax error gives one sentence that names it."""
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    with pytest.raises(Exception, match=says) as caught:
        registry.find(name)
    assert "\n" not in str(caught.value)


SCRIPT = """
raise SystemExit('was run')
def training_data():
    return 1
def main():
    def inner():
        return 2
    print(inner())
def _helper():
    return 3
def loss_of(model, *, scale):
    return 4
def build(units=3, *, depth=2):
    return 5
def network():
    if True:
        return 6
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SCRIPT, "Write train.py:FUNCTION; it could be build or network."),
        ("def make(units):\n    return units\n", "it could be make."),
        ("def main():\n    return\nx = 1\n", "it has none yet that could give a model."),
    ],
)
@pytest.mark.parametrize("name", ["train.py", "train.py:"])
def test_a_file_without_a_function_names_those_that_could_be_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str, name: str
) -> None:
    """The hint lists public functions that return something; the file is only parsed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(RequestError, match="doesn't name a function") as caught:
        registry.find(name, "torch")
    assert says in str(caught.value)


def test_an_error_in_the_users_function_names_their_line(tmp_path: Path) -> None:
    """The message has the user's file, line and error instead of evener's traceback."""
    script = tmp_path / "bad.py"
    script.write_text(
        "def helper():\n    return {}['missing']\n\n\ndef build():\n    return helper()\n"
    )
    with pytest.raises(KeyError) as fault:
        user_code.load(f"{script}:build", {})
    assert user_code.find_line(fault.value) == f"{script}:2"


def test_an_error_below_the_users_function_names_the_line_that_led_there(tmp_path: Path) -> None:
    """If a library raises, the user's last line before it is named."""
    script = tmp_path / "bad_call.py"
    script.write_text("import json\n\n\ndef build():\n    return json.loads('nonsense')\n")
    with pytest.raises(ValueError, match="Expecting value") as fault:
        user_code.load(f"{script}:build", {})
    assert user_code.find_line(fault.value) == f"{script}:5"


def test_the_users_module_may_be_an_installed_one() -> None:
    """In an installed module, its own lines count as the user's, but not other packages'."""
    with pytest.raises(ValueError, match="no rows") as fault:
        exec(compile("raise ValueError('no rows')", pytest.__file__, "exec"))
    assert (
        user_code.find_line(fault.value, "torch:build")
        == f"{__file__}:{fault.traceback[0].lineno + 1}"
    )
    assert user_code.find_line(fault.value, "pytest:build") == f"{pytest.__file__}:1"


def test_packages_of_another_environment_are_no_code_of_the_users() -> None:
    """Packages seen through --system-site-packages don't count as the user's code."""
    assert not user_code.is_user_file("/usr/lib/python3/dist-packages/keras/layers.py")
    assert user_code.is_user_file("/home/me/train.py")


def test_settings_reach_the_users_function(tmp_path: Path) -> None:
    """Text is parsed as a literal; a setting without a parameter is refused."""
    script = tmp_path / "good.py"
    script.write_text(
        "def build(units=3, name='x'):\n    return units, name\n\n\ndef sample_batch(n):\n    "
        "return n\n"
    )
    own = user_code.load(f"{script}:build", {"units": "12", "name": "gru"})
    assert own.result == (12, "gru")
    assert own.sample_batch is not None
    assert own.sample_batch(5) == 5
    with pytest.raises(RequestError, match="unexpected keyword argument 'unit'"):
        user_code.load(f"{script}:build", {"unit": 1})


def test_a_model_is_loaded_by_a_function_of_its_own(tmp_path: Path) -> None:
    """Each function gets the settings that it takes; a default isn't replaced by a loaded model."""
    script = tmp_path / "loads.py"
    script.write_text(
        "def load_model(width=8):\n    return width\n\n\n"
        "def build(model, rate=0.1):\n    return model, rate\n\n\n"
        "def own(model='small'):\n    return model\n\n\n"
        "def other(model, data):\n    import torch\n\n    return model, data\n"
    )

    def made(name: str, **settings: str) -> Any:
        return user_code.load(f"{script}:{name}", settings).result

    assert made("build") == (8, 0.1)
    assert made("build", width="16", rate="0.5") == (16, 0.5)
    assert made("own") == "small"
    with pytest.raises(RequestError, match="unexpected keyword argument 'depth'"):
        made("build", depth="3")
    with pytest.raises(RequestError, match="missing a required argument: 'data'"):
        made("other")
    assert "loads.py:build" in user_code.find_models(tmp_path)
    assert "loads.py:other" not in user_code.find_models(tmp_path)


def test_the_registry_names_the_placements() -> None:
    assert registry.find("keras_towers").placements == ("single", "towers", "alternate")
    assert registry.find("keras_resnet50").placements == ()
