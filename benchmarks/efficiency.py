"""Does a search by samples per joule take the most efficient layout? `python -m
benchmarks.efficiency [MACHINES]`.
"""

from __future__ import annotations

import sys

from tests.support.efficiency_oracle import ENOUGH, is_efficient


def main() -> None:
    """Random simulated machines with power, against an oracle that knows their physics."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    missed = [seed for seed in range(count) if not is_efficient(seed)]
    print(
        f"{count - len(missed)} of {count} machines: a layout within the slow-down with at "
        f"least {ENOUGH:.0%} of the"
        f" most samples per joule; missed: {', '.join(map(str, missed)) or 'none'}."
    )


if __name__ == "__main__":
    main()
