"""The kernel's files of devices, which tests replace by their own folder, or by none.

Sessions of all state folders lock these files, and so would lock each other out of the cores that
all workers measure on.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # hundreds of processes would import it
    from types import ModuleType

SYS_VARIABLE = "EVENER_TESTS_SYS"  # a folder in place of /sys


def keep_off_the_kernels_files(locks: ModuleType) -> None:
    """Make `evener.balancer.store.locks` look for devices in the test's folder."""
    folder = os.environ.get(SYS_VARIABLE)
    if folder:
        vars(locks)["SYS"] = type(locks.SYS)(folder)
