"""What a cubin says of its kernel: name, registers and local memory, read from the file itself.

A cubin is an ELF file. Its section `.nv.info` holds records of a kind, a size and a payload; cuobjdump prints the same.
Compilers that do not print what ptxas says leave no other way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ...errors import BuildError, message
from .compile import Compiled

__all__ = ["parameter_bytes", "read_cubin"]

INFO = ".nv.info"
SIZED = 4  # the format of records that have a payload; others are four bytes in all
REGISTERS, STACK = 0x2F, 0x12  # kinds of records: [symbol, value], 32 bits each
PARAMETER = 0x17  # [32 bits, 16: ordinal, 16: offset, 32: the size from bit 18 on]
NO_BITS = 8  # the kind of sections that take no room in the file


def read_cubin(cubin: bytes, arch: str) -> Compiled:
    """The only kernel of a cubin, and what it needs.

    Raises
    ------
    BuildError
        It is no cubin with one kernel.
    """
    try:
        sections = dict(_sections(cubin))
        entries = [name.removeprefix(f"{INFO}.") for name in sections if name.startswith(f"{INFO}.")]
        values = {kind: payload[4:8] for kind, payload in _records(sections[INFO])}
        (entry,) = entries
        (registers,), (stack_bytes,) = struct.unpack("<I", values[REGISTERS]), struct.unpack("<I", values[STACK])
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise BuildError(
            message("not a cubin with one kernel", got=f"{len(cubin)} bytes; {type(error).__name__}: {error}")
        ) from error
    return Compiled(
        cubin=cubin,
        entry=entry,
        arch=arch,
        registers=registers,
        spill_bytes=stack_bytes,  # what is spilled and what is indexed cannot be told apart
        stack_bytes=stack_bytes,
        static_smem_bytes=0,  # the section of that name also holds what every block of sm_90 has
    )


def parameter_bytes(cubin: bytes) -> tuple[int, ...]:
    """Sizes of the parameters of its only kernel, in their order."""
    (info,) = (content for name, content in _sections(cubin) if name.startswith(f"{INFO}."))
    found = {}
    for kind, payload in _records(info):
        if kind == PARAMETER:
            _, ordinal, _, packed = struct.unpack("<IHHI", payload)
            found[ordinal] = packed >> 18
    return tuple(size for _, size in sorted(found.items()))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    text = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        end = elf.index(b"\0", text + name)
        yield elf[text + name : end].decode(), b"" if kind == NO_BITS else elf[offset : offset + length]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            yield kind, info[at : at + size]
            at += size
