"""What a fork server imports for its children: the framework, and known libraries of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.workloads.registry import find_imports

TORCH = "evener.workloads.torch_backend.user_model"
SCRIPT = """
from __future__ import annotations
import torch, mine
from transformers import Trainer
import lightning as L, datasets
import transformers, mine.models
from .transformers import thing
from .near import thing
def build():
    import peft
"""


def test_a_script_s_libraries_are_imported_and_nothing_of_its_own(tmp_path: Path) -> None:
    """A script's known top-level imports are imported in their order.

    Imports within functions and unknown modules are skipped.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    names = find_imports(f"{tmp_path}/train.py:build", "torch")
    assert names == (TORCH, "transformers:Trainer", "lightning", "datasets", "transformers")


@pytest.mark.parametrize(
    "line",
    [
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'",
        "os.putenv('A', 'b')",
        "os.environ.setdefault('A', 'b')",
        "del os.environ['A']",
        "os.environ |= {'A': 'b'}",
        "set_all(os.environ)",
        "from os import environ",
    ],
)
def test_a_script_that_sets_variables_imports_its_libraries_itself(
    tmp_path: Path, line: str
) -> None:
    """Nothing after an assignment to the environment is preloaded, as imports may read it."""
    (tmp_path / "train.py").write_text(f"{line}\n{SCRIPT}")
    assert find_imports(f"{tmp_path}/train.py:build", "torch") == (TORCH,)


@pytest.mark.parametrize(
    "line",
    [
        "WIDTH = int(os.environ['WIDTH']) if 'WIDTH' in os.environ else 8",
        "WIDTH = os.environ.get('WIDTH', '8'); os.getenv('HOME')",
    ],
)
def test_a_script_that_only_reads_variables_is_spared_its_imports(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "train.py").write_text(f"{line}\nimport peft, torch\ndef build(): ...")
    assert find_imports(f"{tmp_path}/train.py:build", "torch") == (TORCH, "peft")


@pytest.mark.parametrize("text", ["def build(:", None])
def test_a_script_that_can_t_be_read_is_left_to_its_child(tmp_path: Path, text: str | None) -> None:
    """An unreadable script preloads nothing; its child reports the error."""
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    assert find_imports(f"{tmp_path}/train.py:build", "torch") == ()


def test_a_workload_of_the_table_is_imported_by_its_module() -> None:
    """The module of a built-in workload is preloaded; an unknown name preloads nothing."""
    assert find_imports("keras_mnist", "tensorflow") == ("evener.workloads.keras_backend.models",)
    assert find_imports("synthetic", "none") == ("synthetic_workload",)
    assert find_imports("package.module:build", "torch") == (TORCH,)
    assert find_imports("no_such", "torch") == ()
