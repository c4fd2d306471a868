"""The `nvfp4` command."""

from .app import main

__all__ = ["main"]
