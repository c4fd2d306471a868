"""PTX text as a list of instructions. Only what kernels here contain: one entry, blocks of inline code, no calls."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = ["Instruction", "Program", "parse"]

_TOKEN = re.compile(r"\s*[$\w]+:(?!:)|\s*\{(?=\s*\.reg)|\s*\}|[^;{}]*(?:\{[^{}.]*\}[^;{}]*)*;")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_LOCAL = re.compile(r"(?<![%.\w$])[a-zA-Z_]\w*")
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.[usbf](\d+) (\w+)(?:\[(\d+)\])?")
_DYNAMIC = re.compile(r"\.extern \.shared [^;]*?(\w+)\[\]")
_ENTRY = re.compile(r"\.visible \.entry (\w+)")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them, with registers of inline code renamed: "p" of the third block is "p@3"."""

    name: str  # "add.s32"
    operands: tuple[str, ...]  # "%r1", "{%r1, %r2}", "[%rd1+16]", "7"
    guard: str = ""  # a predicate register
    negated: bool = False

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.operands)}"


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]  # what they stand before
    parameters: tuple[int, ...]  # where each begins among their bytes, and where the last one ends
    symbols: dict[str, int]  # addresses of parameters
    shared: tuple[str, ...]  # names of dynamic shared memory


def parse(text: str, entry: str = "") -> Program:
    """One kernel of a PTX module: the first one, unless it is named."""
    text = re.sub(r"//[^\n]*", "", text)
    before, *kernels = _ENTRY.split(text)  # text, name, text, name, text
    found = kernels[kernels.index(entry) + 1 if entry else 1]
    head, _, rest = found.partition(")\n")
    body = rest[rest.index("{") + 1 : rest.rindex("}")]
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    opened: list[int] = []  # their numbers
    blocks = 0
    for token in map(str.strip, _TOKEN.findall(body)):
        if token == "{":
            blocks += 1
            scopes.append({})
            opened.append(blocks)
        elif token == "}":
            scopes.pop()
            opened.pop()
        elif token.endswith(":"):
            labels[_label(token[:-1], opened)] = len(code)
        elif token.startswith(".reg"):
            if scopes:
                scopes[-1].update((name, f"{name}@{blocks}") for name in _declared(token))
        elif token != ";" and not token.startswith(".pragma"):
            one = _instruction(token.rstrip(";").strip(), scopes)
            if one.name.startswith("bra"):
                one = replace(one, operands=(_label(one.operands[0], opened),))
            code.append(one)
    symbols: dict[str, int] = {}
    places = [0]
    for align, kind, name, count in _PARAMETER.findall(head):
        size = int(kind) // 8 * int(count or 1)
        start = -(-places[-1] // int(align or size)) * int(align or size)
        symbols[name] = places[-1] = start
        places.append(start + size)
    return Program(tuple(code), labels, tuple(places), symbols, tuple(_DYNAMIC.findall(before)))


def _label(name: str, opened: list[int]) -> str:
    """Labels of inline code are its own: "DONE" of the third block is "DONE@3"."""
    return name if name.startswith("$") or not opened else f"{name}@{opened[-1]}"


def _declared(token: str) -> list[str]:
    names = []
    for name in re.sub(r"\.reg \.\w+", "", token.rstrip(";")).split(","):
        several = re.fullmatch(r"(\w+)<(\d+)>", name.strip())
        names += [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name.strip()]
    return names


def _instruction(token: str, scopes: list[dict[str, str]]) -> Instruction:
    def renamed(text: str) -> str:
        return _LOCAL.sub(lambda found: next((s[found[0]] for s in reversed(scopes) if found[0] in s), found[0]), text)

    guard, negated = "", False
    found = _GUARD.fullmatch(token)
    if found is not None:
        negated, guard, token = bool(found[1]), renamed(found[2]), found[3]
    name, *rest = token.split(maxsplit=1)
    operands = tuple(renamed(part.strip()) for part in _OPERAND.findall(rest[0])) if rest else ()
    return Instruction(name, operands, guard, negated)
