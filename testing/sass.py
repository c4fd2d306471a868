"""Reads what Hopper's machine code leaves to wgmmas: registers written, and copies begun, while they are in flight.

A wgmma reads its first operand from registers, and its second from shared memory, after it was issued. Only a wait
(WARPGROUP.DEPBAR) says that it is done, and its code asks for no other protection. PTX calls a write to those registers
undefined before the wait; which registers they are ptxas chooses, so this reads the disassembly.

Instructions are taken in the order in which they stand, loops twice; a branch forward is not taken. Writes under a
predicate count.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["InFlight", "disassemble", "wgmmas_in_flight"]

LINE = re.compile(r"\s*(?:(?P<label>\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]+?)\s*;)")
PREDICATE = re.compile(r"@!?U?P\w+\s+")
REGISTER = re.compile(r"R(\d+)")
BRANCH = re.compile(r"BRA\b.*`\((\.L_x_\d+)\)")
# What has no destination among the registers, though an operand in its place may be one.
STORES = {"ST", "STG", "STS", "STL", "STSM", "LDGSTS", "RED", "REDG", "R2P", "R2UR", "CCTL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What machine code does while wgmmas are in flight."""

    wgmmas: int  # instructions in the program
    overwrites: tuple[str, ...]  # instructions that write to registers which one in flight reads or adds to
    at_copy: int  # most of them in flight when an asynchronous copy to shared memory begins
    at_loop_end: int  # most of them in flight when a loop begins again
    unsynchronised_copies: int  # begun with no barrier behind the wait: another warp's wgmma may still read


def disassemble(cubin: bytes) -> str:
    """The machine code as text, by the nvdisasm that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout


def wgmmas_in_flight(sass: str) -> InFlight:
    """See the module.

    Parameters
    ----------
    sass
        Disassembly of one kernel for sm_90a.
    """
    lines = [(m["label"], PREDICATE.sub("", m["text"] or "", count=1)) for m in map(LINE.match, sass.splitlines()) if m]
    labels = {label: i for i, (label, _) in enumerate(lines) if label}
    groups: list[list[set[int]]] = [[]]  # registers of every wgmma, by group; the last is not yet committed
    overwrites: dict[int, str] = {}
    repeated: set[int] = set()
    at_copy = at_loop_end = 0
    loose: set[int] = set()
    synchronised = True
    i = 0
    while i < len(lines):
        _, text = lines[i]
        name = text.partition(" ")[0]
        flying = [registers for group in groups for registers in group]
        if name.startswith("HGMMA"):
            groups[-1].append(_held(text))
            synchronised = False
            if text.endswith("gsb0"):
                groups.append([])
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(text.rpartition(" ")[2], 16)
            groups = [*groups[:-1][-left:], groups[-1]] if left else [groups[-1]]
        elif any(_written(text) & registers for registers in flying):
            overwrites[i] = text
        if name.startswith("BAR.SYNC") and not flying:
            synchronised = True
        if name.startswith(("LDGSTS", "UBLKCP", "UTMALDG")):
            at_copy = max(at_copy, len(flying))
            if not synchronised:
                loose.add(i)
        target = BRANCH.match(text)
        if target and labels[target[1]] < i and i not in repeated:
            at_loop_end = max(at_loop_end, len(flying))
            repeated.add(i)
            i = labels[target[1]]
        else:
            i += 1
    return InFlight(
        wgmmas=sum(text.startswith("HGMMA") for _, text in lines),
        overwrites=tuple(overwrites.values()),
        at_copy=at_copy,
        at_loop_end=at_loop_end,
        unsynchronised_copies=len(loose),
    )


def _held(text: str) -> set[int]:
    """Registers that a wgmma needs until it is done: its first operand if that is in registers, and its sums."""
    name, _, operands = text.partition(" ")
    sums, first = (REGISTER.match(operand.strip()) for operand in operands.split(",")[:2])
    held = set(range(int(first[1]), int(first[1]) + 4)) if first else set()
    if sums:
        columns = int(name.split("x")[1])
        held |= set(range(int(sums[1]), int(sums[1]) + columns // (2 if ".F32" in name else 4)))
    return held


def _written(text: str) -> set[int]:
    """Registers that an instruction writes."""
    name, _, operands = text.partition(" ")
    base = name.partition(".")[0]
    if base in STORES:
        return set()
    first, *rest = (operand.strip() for operand in operands.split(","))
    if first.startswith(("P", "!P")) and base in ("SHFL", "ATOM", "ATOMG", "ATOMS") and rest:
        first = rest[0]  # behind a predicate
    match = REGISTER.match(first)
    if match is None:
        return set()
    two = ".64" in name or ".WIDE" in name or name.endswith(".2")
    count = 4 if ".128" in name or name.endswith(".4") else 2 if two else 1
    return set(range(int(match[1]), int(match[1]) + count))
