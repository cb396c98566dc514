"""The kernel's files of devices, in whose place tests have a folder of their own, or none.

Sessions of all state folders lock these files, and so would keep each other off the cores that all
workers measure on.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # hundreds of processes would import it
    from types import ModuleType

SYS_VARIABLE = "EVENER_TESTS_SYS"  # a folder like /sys


def keep_off_the_kernels_files(locks: ModuleType) -> None:
    """Have `evener.balancer.store.locks` look for devices in the test's folder."""
    folder = os.environ.get(SYS_VARIABLE)
    if folder:
        vars(locks)["SYS"] = type(locks.SYS)(folder)
