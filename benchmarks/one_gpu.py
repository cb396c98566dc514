"""Run scripts for one GPU by `evener run`, then paste the lines that it prints into them.

  python -m benchmarks.one_gpu --sources FOLDER --environment FOLDER --out FOLDER NAME...

Each script of SCRIPTS is a file of a repository in the folder `--sources`; `--environment` is a
virtual environment which has its packages and evener. A script first trains alone and by
`evener run` on two CPU slices: both have to write the same files and learn the same. The lines
that `evener run` has printed are then inserted where they belong, and that script trains by
torchrun and by shares of 3:1, which have to learn the same, too. Data sets of torchvision are
replaced by a few random pictures. Prints a row of docs/run.md's table for each script.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from .installed_programs import NEAR, PLAN, compare_weights, find_reason

SECONDS = 240  # time limit of a run
OBSERVED = Path(__file__).parent / "observed"
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


class Script(msgspec.Struct, frozen=True):
    """A script for one GPU: its repository, its folder there, its name and its arguments."""

    repository: str
    folder: str
    words: str
    pictures: str = ""  # folders that get a few pictures, for a script that reads files
    shorter: tuple[str, str, str] = ("", "", "")  # file, and its text for fewer epochs: old and new


SCRIPTS = {
    "mnist": Script(
        "pytorch/examples", "mnist", "main.py --epochs 2 --batch-size 8 --lr 0.1 --save-model"
    ),
    "feedforward": Script(
        "yunjey/pytorch-tutorial", "tutorials/01-basics/feedforward_neural_network", "main.py"
    ),
    "cifar": Script(
        "kuangliu/pytorch-cifar",
        "",
        "main.py --lr 0.01",
        shorter=("main.py", "start_epoch+200", "start_epoch+6"),
    ),
    "cifar100": Script(
        "weiaicunzai/pytorch-cifar100",
        "",
        "train.py -net squeezenet -b 8",
        shorter=("conf/global_settings.py", "EPOCH = 200", "EPOCH = 3"),
    ),
    "mingpt": Script(
        "karpathy/minGPT",
        "projects/adder",
        "adder.py --trainer.max_iters=12 --trainer.batch_size=8 --trainer.num_workers=1 "
        "--model.embd_pdrop=0 --model.resid_pdrop=0 --model.attn_pdrop=0",
    ),
    "unet": Script(
        "milesial/Pytorch-UNet",
        "",
        "train.py --epochs 1 --batch-size 4 --scale 1 --learning-rate 1e-4",
        pictures="data/imgs data/masks",
    ),
    "gan": Script(
        "eriklindernoren/PyTorch-GAN",
        "implementations/gan",
        "gan.py --n_epochs 2 --batch_size 8 --img_size 28",
    ),
    "tcn": Script(
        "locuslab/TCN",
        "TCN/mnist_pixel",
        "pmnist_test.py --cuda --epochs 1 --batch_size 8 --dropout 0 --levels 3 --nhid 4",
    ),
    "optimizers": Script("MorvanZhou/PyTorch-Tutorial", "tutorial-contents", "306_optimizer.py"),
    "beginner": Script(
        "L1aoXingyu/pytorch-beginner",
        "03-Neural Network",
        "neural_network.py",
        shorter=("03-Neural Network/neural_network.py", "num_epochs = 50", "num_epochs = 8"),
    ),
    "word2vec": Script("graykode/nlp-tutorial", "1-2.Word2Vec", "Word2Vec-Skipgram(Softmax).py"),
    "vae": Script("pytorch/examples", "vae", "main.py --epochs 2 --batch-size 8"),
}


def main() -> None:
    """Try the scripts, and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*SCRIPTS], metavar="NAME")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in options.names:
        script = SCRIPTS[name]
        title = f"{script.repository}, {script.words.split()[0]}"
        print(f"| {' | '.join([title, *try_script(name, options)])} |", flush=True)


def try_script(name: str, options: argparse.Namespace) -> tuple[str, str]:
    """Return whether a script wrote the same files alone, and what its pasted lines led to."""
    script, out = SCRIPTS[name], options.out / name
    shutil.rmtree(out, ignore_errors=True)
    source = options.sources / script.repository.partition("/")[2]
    run = Run(script, source, options.environment, out)
    words = ("python", *script.words.split())
    own = run.start("own", words)
    if own is None:
        return f"can't run: {run.error('own')}", ""
    ours = run.start("alone", ("evener", "run", "--devices", "cpu/2", "--", *words))
    if ours is None:
        return f"FAILED: {run.error('alone')}", ""
    away = compare_weights(run.weights("own"), run.weights("alone"))
    same = own == ours and away == 0
    found = "as alone" if same else f"DIFFERS: {sorted(own ^ ours)[:5]}, weights {away}"
    lines = run.read_lines()
    if not lines.text:
        return found, "no lines were printed"
    if "come from no DataLoader" in run.log("alone"):
        return found, "its rows don't come from a DataLoader, as the message says"
    return found, try_lines(run, lines, script.words.split())


class Lines(msgspec.Struct, frozen=True):
    """The lines that evener printed, and the file and line before which they belong."""

    text: tuple[str, ...]
    file: str
    number: int
    # names such as "model.module.decode", in place of "model.decode", and their lines
    modules: tuple[tuple[str, tuple[int, ...]], ...] = ()


def try_lines(run: Run, lines: Lines, words: list[str]) -> str:
    """Paste lines into a script, train it by torchrun and by shares, and compare the weights."""
    run.pasted = lines
    if run.start("torchrun", (*TORCHRUN, *words)) is None:
        return f"FAILED by torchrun: {run.error('torchrun')}"
    shares = ("evener", "run", "--plan", "plan.toml", "--", "python", *words)
    if run.start("shares", shares) is None:
        return f"FAILED by shares: {run.error('shares')}"
    away = compare_weights(run.weights("torchrun"), run.weights("shares"))
    log = run.log("shares")
    why = find_reason(log)
    outcome = f"even ({why.partition('. ')[0]})" if why else "by shares"
    if "rows a step, with" not in log and not why:
        outcome = "SILENT"
    if away is not None and away <= NEAR:
        return f"{outcome}, {away:.0e}"
    if "normalizes over" in log:
        return f"{outcome}, {away:.0e}; BatchNorm, with a warning"
    return f"{outcome}, {away} DIFFERS"


class Run:
    """Trains a script in several ways, each in a copy of its repository."""

    def __init__(self, script: Script, source: Path, environment: Path, out: Path) -> None:
        self._script, self._source, self._out = script, source, out
        self._environment = environment
        self.pasted: Lines | None = None

    def start(self, way: str, words: tuple[str, ...]) -> set[str] | None:
        """Train in a new copy, and return the names of the files that it wrote there.

        Return None if the program fails, or takes longer than its limit.
        """
        home = self._out / way
        observed = home / "observed"
        observed.mkdir(parents=True)
        copy = home / "copy"
        shutil.copytree(self._source, copy)
        folder = copy / self._script.folder
        (folder / "plan.toml").write_text(PLAN)
        name, old, new = self._script.shorter
        if name:
            (copy / name).write_text((copy / name).read_text().replace(old, new))
        for each in self._script.pictures.split():
            write_pictures(folder / each)
        if self.pasted is not None:
            paste(find_file(self.pasted.file, folder, copy), self.pasted)
        before = list_files(copy)
        with (home / "log.txt").open("w") as log:
            outputs: Any = {"stdout": log, "stderr": log, "start_new_session": True}
            variables = self._variables(observed, copy)
            with subprocess.Popen(words, cwd=folder, env=variables, **outputs) as process:
                try:
                    code = process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    code = -1
                    os.killpg(process.pid, signal.SIGKILL)
        return None if code else list_files(copy) - before

    def _variables(self, observed: Path, copy: Path) -> dict[str, str]:
        kept = {name: each for name, each in os.environ.items() if name != "VIRTUAL_ENV"}
        return {
            **kept,
            "PATH": f"{self._environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{OBSERVED}{os.pathsep}{copy}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OBSERVED": str(observed),
            "TINY_PICTURES": "1",
            "BY_ROW": "1",
            "XDG_STATE_HOME": str(self._out / "state"),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "MPLBACKEND": "agg",
            "PYTHONHASHSEED": "0",
        }

    def log(self, way: str) -> str:
        """Return what a run printed."""
        return (self._out / way / "log.txt").read_text(errors="replace")

    def error(self, way: str) -> str:
        """Return the last line of a run's log that names an error."""
        lines = re.findall(r"^.*\b\w*(?:Error|Exception)\b.*$", self.log(way), re.M)
        return lines[-1].strip()[:200] if lines else "?"

    def weights(self, way: str) -> Any:
        """Return the weights before and after a run; None if none were recorded."""
        import torch

        path = self._out / way / "observed/weights.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def read_lines(self) -> Lines:
        """Return the lines that `evener run` printed for the script."""
        log = self.log("alone")
        found = re.search(r"add before line (\d+) of (\S+\.py)[^\n]*:\n((?:.*    .*\n)+)", log)
        if not found:
            return Lines((), "", 0)
        text = tuple(re.sub(r"^(\[rank \d+\] )?    ", "", line) for line in found[3].splitlines())
        named = re.findall(r"(\S+\.module\.\w+) in lines? (\d+(?:, \d+)*)", found[0])
        modules = ((name, tuple(map(int, numbers.split(", ")))) for name, numbers in named)
        return Lines(text, found[2], int(found[1]), tuple(modules))


def find_file(name: str, folder: Path, copy: Path) -> Path:
    """Return the script's file of this name, in its folder or elsewhere in its repository."""
    own = folder / name
    return own if own.exists() else next(copy.rglob(name))


def paste(path: Path, lines: Lines) -> None:
    """Insert lines into a file, with the indentation of the line there."""
    source = path.read_text().splitlines()
    for name, numbers in lines.modules:
        short = re.escape(name.replace(".module", ""))
        for number in numbers:
            source[number - 1] = re.sub(rf"\b{short}\b", name, source[number - 1])
    place = source[lines.number - 1]
    indent = place[: len(place) - len(place.lstrip())]
    source[lines.number - 1 : lines.number - 1] = [indent + each for each in lines.text]
    path.write_text("\n".join(source) + "\n")


def list_files(folder: Path) -> set[str]:
    """Return the names of the files in a folder, without times and process numbers in them."""
    found = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    return {re.sub(r"\d{2,}[\d_.:-]*", "N", each) for each in found if "__pycache__" not in each}


def write_pictures(folder: Path) -> None:
    """Write a few pictures of 32 x 32 into a folder; those of masks have two values."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    is_mask = folder.name == "masks"
    for number in range(26):
        drawn = numpy.random.default_rng(number).integers(0, 2 if is_mask else 256, (32, 32, 3))
        picture = Image.fromarray((drawn[..., 0] if is_mask else drawn).astype("uint8"))
        suffix = "_mask" if is_mask else ""
        picture.save(folder / f"{number}{suffix}.{'gif' if is_mask else 'png'}")


if __name__ == "__main__":
    main()
