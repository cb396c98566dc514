"""--help and `evener help`; the scripts in docs/your_model.md and in the help are pasted
and run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.tui.cli.main import run
from evener.tui.text.workload_help import KERAS_EXAMPLE, TORCH_EXAMPLE, workload_help
from evener.workloads import registry
from tests.support.cores import two_cores
from tests.support.frameworks import skip_without

pytestmark = pytest.mark.usefixtures("own_folder")

PAGE = Path(__file__).parents[2] / "docs" / "your_model.md"
SCRIPTS = re.findall(r"```python\n# (train_\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(list(arguments)) == 0
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize("command", ["balance", "compare", "probe"])
def test_options_stand_in_groups_and_workloads_are_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The groups are: what, which batches, how long, where.

    The workloads' names and the default of --workload are listed.
    """
    text = _printed(capsys, command, "--help")
    groups = [
        text.index(name)
        for name in ("What is measured", "Which batches", "How long", "Where results go")
    ]
    assert groups == sorted(groups)
    assert all(name in text for name in registry.names())
    assert "keras_maxer on GPUs and simulated devices, keras_mnist on CPUs" in text
    assert text.index("What is measured") < text.index("--workload") < text.index("Which batches")
    assert text.index("Where results go") < text.index("--json")


def test_help_takes_a_topic_or_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`help workload` explains build(); `help balance` is `balance --help`.

    Another word is an error. Without a topic, it lists the topics.
    """
    text = _printed(capsys, "help", "workload")
    assert text == " ".join(workload_help().split())
    assert all(
        word in text
        for word in ("build()", "training_data()", "sample_batch(n)", *registry.names())
    )
    assert _printed(capsys, "help", "probe") == _printed(capsys, "probe", "--help")
    topics = _printed(capsys, "help")
    assert all(word in topics for word in ("workload", "balance", "doctor", "--help"))
    assert run(["help", "fly"]) == 2


def test_the_page_has_the_scripts_of_help() -> None:
    """It has one for each framework, character by character."""
    assert dict(SCRIPTS) == {"train_keras.py": KERAS_EXAMPLE, "train_torch.py": TORCH_EXAMPLE}


@two_cores
@pytest.mark.slow
@pytest.mark.usefixtures("quick_probes", "shared_servers")
@pytest.mark.parametrize(("name", "script"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_a_pasted_script_is_measured_and_trains(
    name: str, script: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file alone suffices: the framework is the one that it imports.

    Its plan, for one device, runs without a launcher. With one device and one batch, there is one
    measurement.
    """
    framework, ranks, train = {
        "train_keras.py": ("tensorflow", "keras_ranks", "run_script"),
        "train_torch.py": ("torch", "trainer_ranks", "save_printed"),
    }[name]
    skip_without(framework)
    Path(name).write_text(script)
    where = [
        "-d",
        "cpu/2:0",
        "--workload",
        f"{name}:build",
        "--global-batch",
        "1000",
        "--multiple-of",
        "1000",
    ]
    capsys.readouterr()
    assert run(["balance", *where, "--budget", "10m", "--export", "plan.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["framework"] == framework
    request.getfixturevalue(ranks)(
        f"tests.support.script_ranks.{train}", str(Path(name).absolute())
    )


def test_a_shell_completes_commands_and_options() -> None:
    """It uses the script that --install-completion adds."""
    environment = {**os.environ, "_EVENER_COMPLETE": "complete_bash"}
    for words, place, wanted in (
        ("evener ba", 1, "balance"),
        ("evener balance --glo", 2, "--global-batch"),
    ):
        typed = {"COMP_WORDS": words, "COMP_CWORD": str(place)}
        command = [sys.executable, "-m", "evener"]
        done = subprocess.run(
            command, env=environment | typed, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [wanted]
