"""Candidates and times as short text: what a reason says and what the command line shows look alike."""

from __future__ import annotations

import msgspec

from ..kernels.problem import DTYPES, Problem

__all__ = ["UNTUNED", "candidate_words", "config_words", "microseconds", "shape_words", "tune_command"]

UNTUNED = "untuned"  # where a plan has no interval


def config_words(text: str) -> str:
    """ "block_rows=64 lookup=quad" from a config's JSON; other text as it is."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, int | float | str | bool])
    except msgspec.DecodeError:
        return text
    return " ".join(f"{name}={value}" for name, value in fields.items())


def candidate_words(text: str) -> str:
    """The same for "kernel {config}"."""
    kernel, _, config = text.partition(" ")
    return f"{kernel} {config_words(config)}" if config else kernel


def microseconds(us: float | None) -> str:
    """Three or four digits; "" for None."""
    if us is None:
        return ""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.0f}" if us >= 200 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def shape_words(problem: Problem) -> str:
    """How the command line names a problem: "4096,14336", "experts=8,n=256,k=128" or "experts=8,top_k=2,hidden=…"."""
    p = problem
    if p.op == "moe":
        return f"experts={p.experts},top_k={p.top_k},hidden={p.k},inter={p.n},activation={p.activation}"
    return f"experts={p.experts},n={p.n},k={p.k}" if p.op == "grouped_gemm" else f"{p.n},{p.k}"


def tune_command(problem: Problem) -> str:
    """What tunes it."""
    option = {"gemm": "--shape", "grouped_gemm": "--grouped", "moe": "--moe"}[problem.op]
    dtype = "" if problem.dtype == DTYPES[0] else f" --dtype {problem.dtype}"
    return f"nvfp4 tune {option} {shape_words(problem)}{dtype}"
