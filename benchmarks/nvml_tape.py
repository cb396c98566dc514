"""Record a tape of NVML on real GPUs: `python -m benchmarks.nvml_tape --out FILE [--seconds 32]`.

All GPUs are read once a second. Matrix products run on the last GPU during the middle half of that
time. nvidia-smi is called in the same seconds, so that a test can compare both.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.gpu_watch import loaded, smi
from evener.devices.nvidia.source import NvmlSource
from tests.support.nvml_tape import NvmlRecorder

WITNESS_EVERY = 4  # ticks


def main() -> None:
    """Record the tape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=32)
    options = parser.parse_args()
    recorder = NvmlRecorder()
    source = NvmlSource(library=recorder)
    last, busy = len(source.devices()) - 1, (options.seconds // 4, 3 * options.seconds // 4)
    ticks: list[float] = []
    witness = []
    with ExitStack() as load:
        for second in range(options.seconds):
            if second == busy[0]:
                load.enter_context(loaded([last], options.seconds))
            if second == busy[1]:
                load.close()
            time.sleep(max(0.0, recorder.began + second - time.monotonic()))
            ticks.append(round(time.monotonic() - recorder.began, 3))
            source.sample()
            if second % WITNESS_EVERY == WITNESS_EVERY - 1:
                witness.append([round(time.monotonic() - recorder.began, 3), smi()])
    source.close()
    note = (
        f"matrix products on GPU {last} from second {busy[0]} to {busy[1]}, their start "
        f"and end included"
    )
    options.out.write_text(
        "\n".join(recorder.lines(note=note, ticks=ticks, nvidia_smi=witness)) + "\n"
    )


if __name__ == "__main__":
    main()
