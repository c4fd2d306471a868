"""Candidates and times as short text: what a reason says and what the command line shows look alike."""

from __future__ import annotations

import msgspec

__all__ = ["candidate_words", "config_words", "microseconds"]


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
