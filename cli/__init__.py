"""The `nvfp4` command."""

from .entry import main

__all__ = ["main"]
