"""Sections of benchmarks.gpu: gradient exchange, running out of memory, tests on GPUs.

They use as many GPUs as `--gpus` names, one or two.
"""

from __future__ import annotations

from contextlib import nullcontext

from benchmarks.gpu_bench import GpuBench
from benchmarks.trainer_processes import name_build

TESTS = (  # tests on two GPUs, grouped by what may run together: the last group measures times
    (
        "tests/evener/test_torch_exact.py",
        "tests/evener/test_torch_rebalance.py",
        "tests/evener/test_torch_oom.py",
        "tests/evener/test_torch_shards.py",
    ),
    ("tests/evener/test_huggingface.py", "tests/evener/test_lightning.py"),
    ("tests/evener/test_torch_peers.py",),
    ("tests/evener/test_torch_own_work.py",),
)
ORDER = ("--models", "4", "2", "5", "0", "1", "3")  # models of benchmarks.gpu_steps
SHORT = {  # cases of benchmarks.gpu_oom
    "step": ("cap8", "cap12", "cap20", "long", "neighbour", "libraries"),
    "transformers": ("cap8", "neighbour"),
    "lightning": ("cap12", "neighbour"),
}
TRAINERS = {  # size, and rows per batch on two GPUs
    "torch": ("middle", 256),
    "huggingface": ("large", 128),
    "accelerate": ("large", 128),
    "lightning": ("large", 128),
}


def exchange(bench: GpuBench) -> None:
    """9. Compare step times of evener's exchange with DistributedDataParallel's, in turns.

    The models that were last above the bar come first.
    """
    pair = ("--ways", "ddp", "exchange")
    if len(bench.gpus) > 1:
        _steps(bench, "exchange", (*pair, "--turns", "5", *ORDER), 150)
    else:
        _steps(bench, "exchange", ("--ways", "alone", *pair[1:], "--turns", "4", *ORDER), 150)
        more = (*pair, "--rounds", "1", "--turns", "5", "--models", "1", "4")
        _steps(bench, "exchange in float32", (*more, "--float32"), 45)
        _steps(bench, "exchange in passes", (*more, "--passes", "2"), 45)
    one = (*pair, "--rounds", "1", "--turns", "1", "--models", "4")
    _steps(bench, "exchange profiled", (*one, "--profile", str(bench.out)), 60)


def _steps(bench: GpuBench, name: str, words: tuple[str, ...], seconds: float) -> None:
    file = bench.out / f"{name.replace(' ', '-')}.json"
    ranks = ("--ranks", str(2 if bench.small else len(bench.gpus)))
    chosen = ("--models", "0", "--rounds", "1") if bench.small else ()
    bench.script(
        name, "benchmarks.gpu_steps", *ranks, *words, *chosen, "--json", str(file), seconds=seconds
    )


def failures(bench: GpuBench) -> None:
    """10. Inject out-of-memory errors on two ranks; kill a rank or press Ctrl-C during a retry."""
    wanted = (
        "--failures",
        "100" if bench.small else "1000",
        "--at-once",
        "1" if bench.small else "3",
    )
    bench.script(
        "failures", "benchmarks.oom", *wanted, "--out", str(bench.out / "oom"), seconds=140
    )
    ends = ("kill", "interrupt", "--json", str(bench.out / "ends.json"))
    bench.script("ends", "benchmarks.gpu_exchange", *ends, seconds=90)


def memory_neighbour(bench: GpuBench) -> None:
    """10. Let a program take most of the last GPU's memory during training, and leave again."""
    words = ("--ranks", str(len(bench.gpus)), "--json", str(bench.out / "neighbour.json"))
    if not bench.small:
        bench.script(
            "a neighbour's memory", "benchmarks.gpu_exchange", "neighbour", *words, seconds=110
        )


def one_gpu_caps(bench: GpuBench) -> None:
    """10. Train with two ranks on one GPU, the second with little memory; train short of memory."""
    words = ("caps", "--caps", "1.8", "1.45", "--json", str(bench.out / "caps.json"))
    bench.script("caps of two ranks", "benchmarks.gpu_exchange", *words, seconds=60)
    for way, cases in SHORT.items():
        chosen = (way, "--only", *cases, "--json", str(bench.out / f"oom-{way}.json"))
        bench.script(f"memory short in {way}", "benchmarks.gpu_oom", *chosen, seconds=100)


def tests(bench: GpuBench) -> None:
    """11. Run the test suite's tests for two GPUs."""
    chosen = ("-q", "-p", "no:cacheprovider", "-k", "gpus")
    for number, files in enumerate(TESTS):
        bench.script(f"tests {number}", "pytest", *chosen, *files, seconds=100)


def plans(bench: GpuBench) -> None:
    """3. Find plans with the second GPU at 60 %, for comparison with docs/benchmarks/gpu.md."""
    size = ("--set", "size=small") if bench.small else ("--set", "size=large", "--set", "bf16=true")
    trainer = (name_build("huggingface"), *size, "--global-batch", "8" if bench.small else "192")
    maxer = ("torch_maxer", "--global-batch")
    cases = {
        "torch_maxer 256": (*maxer, "256"),
        "torch_maxer 4096": (*maxer, "4096"),
        "huggingface 192": trainer,
    }
    with bench.mps() as variables:
        for name, (workload, *words) in cases.items():
            bench.balance(
                f"plans {name}", bench.limited("", "60%"), workload, *words, env=variables
            )


def trusted(bench: GpuBench) -> None:
    """12. Compare plans with training runs that follow them, in turns.

    The second of two GPUs runs at 60 %. Both a training run and the probe beside it need memory: 80
    GB suffice for 80 rows of the large model each.
    """
    pair = len(bench.gpus) > 1
    where = bench.limited("", "60%") if pair else f"{bench.kind}:{bench.gpus[0]}"
    length = ("--devices", where, "--budget", bench.budget, "--seconds", "18", "--blocks", "6")
    with bench.mps() if pair else nullcontext({}) as variables:
        for trainer, (size, rows) in TRAINERS.items():
            batch = rows if pair else rows // 2
            if bench.small:
                batch = 8
            sizes = ("--size", "small") if bench.small else ("--size", size, "--bf16")
            words = (
                "plan",
                "--trainers",
                trainer,
                *length,
                *sizes,
                "--balance",
                "global-batch",
                str(batch),
            )
            bench.script(
                f"trusted {trainer}", "benchmarks.trainers", *words, seconds=200, env=variables
            )
