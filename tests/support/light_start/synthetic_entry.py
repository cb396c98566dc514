"""Registers the synthetic workload for tests, without importing it or any framework."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # hundreds of test processes read this file, so it imports little
    from typing import Any

SETTINGS = {
    "base_ms": 5.0,
    "per_sample_ms": 0.05,
    "noise": 0.0,
    "network_ms": 0.0,
    "memory_base_mib": 1.0,
    "memory_per_sample_mib": 0.0,
    "fail": "",
    "at_share": 0,
    "at_step": 0,
    "exit_code": 3,
    "parameters": 1000,
}


def add_to(registry: Any) -> None:
    """Register the workload under its name."""
    summary = "spins the CPU for a given time and holds real memory"
    registry.add(
        registry.Entry(
            "synthetic", "none", "synthetic_workload:build", summary, "made here", SETTINGS
        )
    )
