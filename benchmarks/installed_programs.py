"""Runs published training programs as they are: by their own launcher, by shares 3:1, and by shares
that move.

`python -m benchmarks.installed_programs --environments FOLDER --inputs FOLDER NAME...` wants each
program's environment (with evener beside it) as FOLDER/ENVIRONMENT, its script as FOLDER/src/...,
and what benchmarks/installed_inputs.py has written. It prints a row of docs/run.md for each:
versions, evener's first words, and how far the weights are from those of the program's own
launcher, in parts of the norm of their change. Two CPU slices train, without a network.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec

SECONDS = 150  # of a start, which else hangs
PLAN = """
[[layout.share]]
device = "cpu-0-of-2"
batch = 3
[[layout.share]]
device = "cpu-1-of-2"
batch = 1
"""
TRAINING = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 3 "
    "--report_to none"
    " --logging_steps 5 --save_strategy no --output_dir out --seed 7"
)
SFT = (
    "--model_name_or_path {inputs}/llama --dataset_name {inputs}/chat --max_length 64 "
    "--use_cpu --bf16 False"
    " --lr_scheduler_type linear"
)
FACTORY = """
stage: sft
do_train: true
model_name_or_path: {inputs}/llama
dataset_dir: {inputs}
dataset: tiny
template: default
finetuning_type: full
cutoff_len: 64
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 3
logging_steps: 5
save_strategy: "no"
report_to: none
use_cpu: true
learning_rate: {rate}
optim: {optimizer}
lr_scheduler_type: linear
"""
AXOLOTL = """
base_model: {inputs}/llama
datasets:
  - path: {inputs}/alpaca.jsonl
    ds_type: json
    type: alpaca
sequence_len: 128
output_dir: out
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 3
learning_rate: {rate}
optimizer: {optimizer}
lr_scheduler: linear
logging_steps: 5
save_strategy: "no"
val_set_size: 0
bf16: false
tf32: false
use_cpu: true
"""


class Program(msgspec.Struct, frozen=True):
    """A program: its environment, what is run there, the packages whose versions count, and how it
    starts itself.
    """

    environment: str
    words: str  # after python; {inputs}, {src}, {rate} and {optimizer} are filled in
    packages: tuple[str, ...]
    settings: str = ""  # a file x.yaml in the working folder
    own: str = "torchrun --nproc-per-node 2 {words}"
    variables: tuple[tuple[str, str], ...] = ()  # of the program's own launcher
    optimizers: tuple[tuple[str, str], ...] = (("sgd", "0.05"), ("adamw_torch", "1e-3"))


TRAINERS = ("transformers", "accelerate")
PROGRAMS = {
    "trl": Program(
        "hf",
        f"-m trl.scripts.sft {SFT} {TRAINING} --optim {{optimizer}} --learning_rate {{rate}}",
        ("trl", *TRAINERS),
    ),
    "run_clm": Program(
        "hf",
        "{src}/run_clm.py --model_name_or_path {inputs}/llama --train_file {inputs}/text.txt "
        "--do_train"
        " --block_size 32 --max_train_samples 128"
        f" --use_cpu {TRAINING} --optim {{optimizer}} --learning_rate {{rate}}",
        TRAINERS,
    ),
    "run_clm64": Program(
        "hf",
        "{src}/run_clm.py --model_name_or_path {inputs}/llama64 --dtype auto --train_file "
        "{inputs}/text.txt --do_train"
        f" --block_size 32 --max_train_samples 128 --use_cpu {TRAINING} --optim {{optimizer}} "
        f"--learning_rate {{rate}}",
        TRAINERS,
    ),
    "nlp_example": Program(
        "hf",
        "{src}/accelerate/examples/nlp_example.py --cpu",
        ("accelerate",),
        optimizers=(("adamw", ""),),
    ),
    "complete_nlp_example": Program(
        "hf",
        (
            "{src}/accelerate/examples/complete_nlp_example.py --cpu --checkpointing_steps epoch "
            "--output_dir out"
        ),
        ("accelerate",),
        optimizers=(("adamw", ""),),
    ),
    "llamafactory": Program(
        "llamafactory",
        "llamafactory-cli train x.yaml",
        ("llamafactory", *TRAINERS),
        FACTORY,
        "llamafactory-cli train x.yaml",
        (("FORCE_TORCHRUN", "1"), ("NPROC_PER_NODE", "2")),
    ),
    "swift": Program(
        "swift",
        "swift sft --model {inputs}/llama --model_type llama --template default --dataset "
        "{inputs}/chat/train.jsonl"
        " --tuner_type full --torch_dtype float32 --max_length 64 --use_cpu true "
        "--gradient_checkpointing false"
        f" --split_dataset_ratio 0 {TRAINING} --optim {{optimizer}} --learning_rate {{rate}}",
        ("ms_swift", *TRAINERS),
        own="{words}",
        variables=(("NPROC_PER_NODE", "2"),),
    ),
    "axolotl": Program(
        "axolotl",
        "-m axolotl.cli.train x.yaml",
        ("axolotl", *TRAINERS),
        AXOLOTL,
    ),
    "timm": Program(
        "hf",
        "{src}/timm/train.py --data-dir {inputs}/images --val-split train --device cpu "
        "--model vit_tiny_patch16_224"
        " --input-size 3 32 32 --gp avg --model-kwargs img_size=32 patch_size=8 depth=2 "
        "embed_dim=48 num_heads=3"
        " class_token=False --num-classes 2 -b 4 --epochs 1 --warmup-epochs 0 --sched step "
        "--decay-epochs 100"
        " --lr {rate} --opt {optimizer} --no-aug --workers 1 --output out",
        ("timm",),
        optimizers=(("sgd", "0.05"), ("adamw", "1e-3")),
    ),
    "lightning": Program(
        "hf",
        "{here}/lightning_boring.py {optimizer} {rate}",
        ("lightning",),
        optimizers=(("sgd", "0.05"), ("adamw", "1e-3")),
    ),
    "ultralytics": Program(
        "ul",
        "yolo classify train data={inputs}/images model=yolo11n-cls.yaml imgsz=32 epochs=2 "
        "batch=8 device=cpu val=False"
        " plots=False workers=0 project=out pretrained=False optimizer={optimizer} lr0={rate}",
        ("ultralytics",),
        optimizers=(("SGD", "0.01"),),
        own="torchrun --nproc-per-node 2 --no-python {words}",
    ),
}


def main() -> None:
    """Print a row for each of the programs, and each of its optimizers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=[*PROGRAMS], metavar="NAME", help=", ".join(PROGRAMS)
    )
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--ways", default="plan,moved", help="plan, moved")
    options = parser.parse_args()
    for name in options.names:
        for optimizer, rate in PROGRAMS[name].optimizers:
            report(name, optimizer, rate, options)


def report(name: str, optimizer: str, rate: str, options: argparse.Namespace) -> None:
    """Train one program by one optimizer, its own way and by shares."""
    program = PROGRAMS[name]
    places = {
        "inputs": options.inputs,
        "src": options.environments / "src",
        "here": Path(__file__).parent,
        "rate": rate,
        "optimizer": optimizer,
    }
    own = Start(program, options, places, f"{name}-{optimizer}-own").run()
    print(f"{name} {optimizer}: {own.versions()}; own launcher: {own.ended()}", flush=True)
    for way in options.ways.split(","):
        ours = Start(program, options, places, f"{name}-{optimizer}-{way}", way).run()
        print(f"  {way}: {ours.ended()}; {own.compare(ours)}")
        print(*(f"    {line}" for line in ours.said()), sep="\n", flush=True)


class Start:
    """One start of a program in a folder of its own: `way` is "plan" or "moved", or none for its
    own launcher.
    """

    def __init__(
        self,
        program: Program,
        options: argparse.Namespace,
        places: dict[str, Any],
        name: str,
        way: str = "",
    ) -> None:
        self._program, self._way = program, way
        self._home = options.environments / program.environment
        self._folder = options.environments / "runs" / name
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for each in ("bert-base-cased", "nyu-mll", "glue"):
            (self._folder / each).symlink_to(options.inputs / each)
        (self._folder / "x.yaml").write_text(program.settings.format(**places))
        (self._folder / "plan.toml").write_text(PLAN)
        self._words = program.words.format(**places)
        self._code = -1

    def run(self) -> Start:
        """Train."""
        words = self._words.split()
        if not self._way:
            words = self._program.own.format(words=self._words).split()
        else:
            python = [] if Path(words[0]).suffix == ".py" or words[0] != "-m" else ["python"]
            shares = ["--plan", "plan.toml"] if self._way == "plan" else ["--devices", "cpu/2"]
            words = ["evener", "run", *shares, "--", *python, *words]
        with (self._folder / "log.txt").open("w") as log:
            outputs: Any = {"stdout": log, "stderr": log, "start_new_session": True}
            with subprocess.Popen(
                words, cwd=self._folder, env=self._environment(), **outputs
            ) as process:
                try:
                    self._code = process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        return self

    def _environment(self) -> dict[str, str]:
        keep = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        offline = dict.fromkeys(
            ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"
        )
        return {
            **keep,
            **offline,
            **({} if self._way else dict(self._program.variables)),
            **({"MOVED": "1"} if self._way == "moved" else {}),
            "PATH": f"{self._home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parent / "observed"),
            "OBSERVED": str(self._folder),
            "HF_HOME": str(self._folder / "home"),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "OMP_NUM_THREADS": "1",
            "AXOLOTL_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
        }

    def versions(self) -> str:
        """The packages' versions."""
        code = (
            "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in "
            "sys.argv[1:]), sep=', ')"
        )
        words = [str(self._home / "bin/python"), "-c", code, *self._program.packages]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()

    def ended(self) -> str:
        """How it ended: what it printed last, where it failed."""
        if not self._code:
            return "ended"
        lines = [
            line for line in (self._folder / "log.txt").read_text().splitlines() if "Error" in line
        ]
        return f"exit code {self._code}: {(lines or ['?'])[0][:300]}"

    def said(self) -> list[str]:
        """What evener said."""
        lines = (self._folder / "log.txt").read_text().splitlines()
        found = [line for line in lines if re.search(r"evener: |rows change|rebalanc", line)]
        return list(dict.fromkeys(found))[:8]

    def weights(self) -> dict[str, Any] | None:
        """The weights before and after, on the first rank."""
        import torch

        path = self._folder / "weights.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def compare(self, other: Start) -> str:
        """The difference of the weights at the end."""
        mine, its = self.weights(), other.weights()
        if mine is None or its is None:
            return "no weights were seen"
        if any(not mine["before"][name].equal(its["before"][name]) for name in mine["before"]):
            return "they begin with other weights"

        def norm(one: dict[str, Any], two: dict[str, Any]) -> float:
            return math.sqrt(
                sum(float((one[name].double() - two[name].double()).square().sum()) for name in one)
            )

        change = max(norm(mine["before"], mine["after"]), 1e-30)
        kind = str(next(iter(mine["after"].values())).dtype).removeprefix("torch.")
        return (
            f"weights differ by {norm(mine['after'], its['after']) / change:.1e} of their "
            f"change ({kind})"
        )


if __name__ == "__main__":
    main()
