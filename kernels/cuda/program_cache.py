"""Compiled programs on disk: bytes by key, in the user's cache folder or in NVFP4_KERNEL_CACHE.

Nothing that goes wrong here stops a build: there is one warning, and programs are compiled again.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import message

__all__ = ["Counts", "counts", "folder", "foreign", "load", "open_to_all", "save"]

MAX_BYTES = 1 << 30  # programs that were not read for the longest time go first
DIGEST_BYTES = 32
OWN = ("entries", "tmp")  # all that is ever in the folder

_lock = threading.Lock()
_open: dict[Path, Any] = {}  # FileStreamProgramCache, or None for a folder that cannot be used
_warned = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of this process's requests."""

    found: int = 0  # loaded
    saved: int = 0
    lost: int = 0  # could not be saved

    def since(self, before: Counts) -> Counts:
        """What came to it after `before`."""
        return Counts(found=self.found - before.found, saved=self.saved - before.saved, lost=self.lost - before.lost)


_counts = Counts()


def counts() -> Counts:
    """How many programs were found and saved so far."""
    return _counts


def _count(*, found: int = 0, saved: int = 0, lost: int = 0) -> None:
    global _counts
    with _lock:
        _counts = Counts(found=_counts.found + found, saved=_counts.saved + saved, lost=_counts.lost + lost)


def folder() -> Path:
    """NVFP4_KERNEL_CACHE if set, else `cuda` in the user's cache folder."""
    named = os.environ.get("NVFP4_KERNEL_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    from platformdirs import user_cache_path

    return user_cache_path("nvfp4", appauthor=False) / "cuda"


def load(key: str) -> bytes | None:
    """What was saved under the key; None when there is nothing, or it is damaged."""
    programs = _programs()
    if programs is None:
        return None
    try:
        stored: bytes | None = programs.get(key)
    except OSError as error:
        _warn(error)
        return None
    if stored is None:
        return None
    digest, value = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    if hashlib.sha256(value).digest() != digest:
        _warn("a damaged entry")
        return None
    _count(found=1)
    return value


def save(key: str, value: bytes) -> None:
    """Save bytes under a key, for every process; a reader sees all of them or none."""
    programs = _programs()
    if programs is None:
        _count(lost=1)
        return
    try:
        programs[key] = hashlib.sha256(value).digest() + value
    except OSError as error:
        _count(lost=1)
        _warn(error)
        return
    _count(saved=1)


def foreign(path: Path) -> list[str]:
    """Names in a folder that are none of the programs'; sorted."""
    return sorted({entry.name for entry in path.iterdir()}.difference(OWN))


def open_to_all(path: Path) -> None:
    """Let every user read the programs of a folder that will be shipped; only its owner may write.

    Programs are written for their owner alone, and a folder that a process may not list is of no use to it. What else
    is there stays as it is.
    """
    os.chmod(path, 0o755)
    for own in OWN:
        for parent, _, names in os.walk(path / own):
            os.chmod(parent, 0o755)
            for name in names:
                file = os.path.join(parent, name)
                if not os.path.islink(file):
                    os.chmod(file, 0o644)


def _programs() -> Any | None:
    path = folder()
    with _lock:
        if path not in _open:
            _open[path] = _opened(path)
        return _open[path]


def _opened(path: Path) -> Any | None:
    try:
        utils = importlib.import_module("cuda.core.utils")
        # mkdir gives its mode to the last folder alone, and the default one's parent holds the tuning database.
        if not os.environ.get("NVFP4_KERNEL_CACHE"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return utils.FileStreamProgramCache(path, max_size_bytes=MAX_BYTES)
    except OSError as error:
        _warn(error)
        return None


def _warn(got: object) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            message(
                f"kernel cache {folder()}: what it lacks is compiled again",
                got=got,
                do="check the folder and its disk, or name another folder in NVFP4_KERNEL_CACHE",
            ),
            RuntimeWarning,
            stacklevel=2,
        )
