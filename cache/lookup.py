"""What the dispatcher needs: the plan of a problem, whatever state the database is in, without raising or writing."""

from __future__ import annotations

import warnings

from ..errors import DatabaseError, caller_level
from ..kernels.problem import Device, Problem
from .records import Plan

__all__ = ["find_plan"]

_warned = False


def find_plan(device: Device, problem: Problem) -> Plan | None:
    """The plan in force in the user's database, or None.

    A database that is locked, damaged, foreign, newer or unreadable is a RuntimeWarning, once per process; one that
    is missing or empty is the untuned case and no warning. Nothing is written, and no file made.
    """
    global _warned
    from .store import Store

    try:
        with Store.open(readonly=True) as store:
            return store.load_plan(device, problem)
    except DatabaseError as error:
        if error.reason != "missing" and not _warned:
            _warned = True
            warnings.warn(f"tuning results are not used: {error}", RuntimeWarning, stacklevel=caller_level())
        return None
