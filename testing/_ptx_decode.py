"""Instructions of `testing.ptx` with all that is the same each time they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._ptx_parse import Instruction, Program
from ._ptx_values import ARITHMETIC, Array
from ._ptx_warp import Warp

__all__ = ["Step", "decode"]

IGNORED = ("membar", "griddepcontrol")  # one block runs at a time, and one kernel
# Others may run after these.
PAUSES = ("barrier", "mbarrier", "cp", "bar", "vote", "ldmatrix", "stmatrix", "wgmma", "atom")

Execute = Callable[[Warp, Array], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction."""

    one: Instruction
    guard: str  # a predicate register, or ""
    negated: bool
    execute: Execute | None  # for a warp and the lanes that run; None for what changes where lanes go on:
    goes: str = ""  # "bra", "ret", or "bar", which is a barrier of the whole block
    target: int = 0  # of "bra"
    pauses: bool = False


def decode(program: Program) -> tuple[Step, ...]:
    """All instructions of a kernel."""
    return tuple(_step(one, program.labels) for one in program.code)


def _step(one: Instruction, labels: dict[str, int]) -> Step:
    op, *kinds = one.name.split(".")
    if op == "bra":
        return Step(one, one.guard, one.negated, None, op, labels[one.operands[0]])
    if op == "ret" or (op == "bar" and kinds[0] == "sync" and len(one.operands) == 1):
        return Step(one, one.guard, one.negated, None, op)
    return Step(one, one.guard, one.negated, _execute(op, kinds, one.operands), pauses=op in PAUSES)


def _execute(op: str, kinds: list[str], operands: tuple[str, ...]) -> Execute:
    special = getattr(Warp, f"_{op}", None)
    if special is not None:
        return lambda warp, run: special(warp, kinds, operands, run)
    if op in ARITHMETIC:
        function = ARITHMETIC[op]
        return lambda warp, run: warp.calculate(function, kinds[-1], operands, run)
    return _nothing if op in IGNORED else _unknown


def _nothing(warp: Warp, run: Array) -> None:
    pass


def _unknown(warp: Warp, run: Array) -> None:
    raise AssertionError("not an instruction that this knows")
