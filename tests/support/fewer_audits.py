"""Fewer audits in a process that trains many programs.

An audit takes as long as dozens of steps of a small model, and a training of a few steps has four.
"""

from __future__ import annotations

from evener.training import audit


def audit_first_step() -> None:
    """Audit the first step of each training in this process, and no later step or change.

    This is for tests of what a training learns. test_torch_exact.py (two ranks),
    test_trainer_audits.py and test_torch_audit.py have all audits.
    """
    vars(audit).update(FIRST_STEPS=(1,), MOST_CHANGES=0)
