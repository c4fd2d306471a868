"""The tensors of a checkpoint's safetensors files: headers first, values one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ...errors import InvalidInput, message

__all__ = ["TensorFiles", "TensorInfo", "listed"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OPEN_FILES = 4  # a layer is rarely in more


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor as its header describes it; `dtype` as safetensors spells it: "U8", "F8_E4M3", "BF16", "F32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Names for a message, the first few of many."""
    found = sorted(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


class TensorFiles:
    """The safetensors files of a folder, or one such file.

    Parameters
    ----------
    path
        With an index beside the files, the index names them; else model.safetensors, else all *.safetensors there.

    Raises
    ------
    InvalidInput
        No such files; one that is damaged; an index that does not fit its files; a tensor in two files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, Any] = {}
        self.infos: Mapping[str, TensorInfo] = self._read_headers(*self._files())

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        """The files, and which of them the index has each tensor in."""
        if self.path.is_file():
            return [self.path], None
        if (self.path / INDEX).exists():
            try:
                index = msgspec.json.decode((self.path / INDEX).read_bytes(), type=_Index)
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidInput(message(f"{self.path / INDEX} cannot be read", got=error)) from error
            places = {name: file.rpartition("/")[2] for name, file in index.weight_map.items()}
            lost = {file for file in set(places.values()) if not _exists(self.path / file)}
            if lost:
                names = (name for name, file in places.items() if file in lost)
                raise InvalidInput(
                    message(
                        f"{self.path} is incomplete",
                        got=f"no {listed(lost)}",
                        expected=f"these files: they hold {listed(names)}",
                        do="fetch the rest of the checkpoint",
                    )
                )
            return [self.path / file for file in sorted(set(places.values()))], places
        if (self.path / SINGLE).exists():
            return [self.path / SINGLE], None
        found = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else []
        if not found:
            raise InvalidInput(
                message(
                    f"{self.path} is no checkpoint",
                    got="no *.safetensors there" if self.path.is_dir() else "no such folder",
                    expected="a folder with safetensors files and a config.json",
                )
            )
        return found, None

    def _read_headers(self, files: list[Path], places: dict[str, str] | None) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for file in files:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in infos:
                    raise InvalidInput(
                        message(
                            f"{name} is in two files", got=f"{infos[name].file.name} and {file.name}", expected="one"
                        )
                    )
                header = handle.get_slice(name)
                infos[name] = TensorInfo(
                    name=name, dtype=header.get_dtype(), shape=tuple(header.get_shape()), file=file
                )
        if places is not None:
            self._check_index(infos, places)
        return infos

    def _check_index(self, infos: dict[str, TensorInfo], places: dict[str, str]) -> None:
        missing = {name for name, file in places.items() if name not in infos or infos[name].file.name != file}
        extra = set(infos) - set(places)
        if missing or extra:
            raise InvalidInput(
                message(
                    f"{self.path / INDEX} does not fit its files",
                    got="; ".join(
                        f"{word}: {listed(names)}"
                        for word, names in (("not where it says", missing), ("not in it", extra))
                        if names
                    ),
                    do="fetch the whole checkpoint again, or write the index anew",
                )
            )

    def read(self, name: str) -> Tensor:
        """A tensor that lies in the mapped file: copy what is to be kept."""
        return self._handle(self.infos[name].file).get_tensor(name)  # type: ignore[no-any-return]

    def part(self, name: str, *ranges: slice) -> Tensor:
        """A part of a tensor, like `read`."""
        if all(found == slice(None) for found in ranges):
            return self.read(name)
        return self._handle(self.infos[name].file).get_slice(name)[ranges]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Unmap the files; they are opened again when a tensor is read."""
        self._open.clear()

    def _handle(self, file: Path) -> Any:
        if file in self._open:
            handle = self._open[file] = self._open.pop(file)  # the last one used is the last one to be closed
            return handle
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(str(file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise InvalidInput(
                message(f"{file} cannot be read", got=error, do="fetch the file again: it may be cut short")
            ) from error
        while len(self._open) >= OPEN_FILES:
            self._open.pop(next(iter(self._open)))
        self._open[file] = handle
        return handle


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # no name that a file can have
        return False
