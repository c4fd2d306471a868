"""A routing that a user recorded: read from a file, checked, and repeated as far as a measurement needs tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ..cache.records import RECORDED
from ..errors import InvalidInput, message
from ..kernels.problem import Problem
from .messages import Recorded

__all__ = ["read_routing", "recorded_ids"]

NAME = "topk_ids"  # of the tensor in a safetensors file that has several
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def read_routing(path: Path, problems: Iterable[Problem] = (), *, most_tokens: int | None = None) -> Recorded:
    """The experts of recorded tokens, in the order of the file.

    Parameters
    ----------
    path
        Integers [tokens, top_k], -1 for a slot that goes elsewhere: a `.npy` file, a `.safetensors` file with one
        tensor or one named "topk_ids", or a `.json` file with a list of lists. Tokens at the beginning that name no
        expert are put at the end: on a rank with a part of the experts, one token would else be timed doing nothing.
    problems
        That it must fit: their number of experts and, of `moe`, their top_k.
    most_tokens
        What lies beyond is not kept; the name is that of the whole.

    Raises
    ------
    InvalidInput
        The file cannot be read, or holds something else.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise _wrong(path, path.suffix or "no suffix", " or ".join(READERS))
    try:
        ids = reader(path)
    except InvalidInput:
        raise
    except FileNotFoundError as error:
        raise InvalidInput(message(f"{path} cannot be read: there is no such file")) from error
    except OSError as error:
        raise _wrong(path, error.strerror or error, f"a {path.suffix} file") from error
    except Exception as error:  # each library has its own
        raise _wrong(path, f"{type(error).__name__}: {error}", f"a {path.suffix} file") from error
    if ids.dtype not in INTEGERS:
        raise _wrong(path, ids.dtype, "integers")
    if ids.ndim != 2 or 0 in ids.shape:
        raise _wrong(path, f"shape {tuple(ids.shape)}", "[tokens, top_k], at least one of each")
    wraps, ids = ids.dtype == torch.uint64, ids.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if wraps and low < 0:
        raise _wrong(path, f"an id of {low + (1 << 64)}", "numbers of experts")
    if low < -1 or high < 0 or high >= 1 << 31:
        raise _wrong(path, f"ids from {low} to {high}", "numbers of experts, or -1 for a slot that goes elsewhere")
    for problem in problems:
        if high >= problem.experts:
            raise _wrong(path, f"expert {high}", f"ids below {problem.experts}, the experts of {problem.label}")
        if problem.op == "moe" and ids.shape[1] != problem.top_k:
            raise _wrong(path, f"{ids.shape[1]} experts a token", f"top_k = {problem.top_k} of {problem.label}")
    ids = ids.to(torch.int32).contiguous()
    digest = hashlib.sha256(f"{ids.shape[1]}\0".encode() + ids.numpy().tobytes()).hexdigest()
    ids = ids.roll(-int((ids >= 0).any(dim=1).int().argmax()), 0)[:most_tokens]
    return Recorded(name=RECORDED + digest[:12], ids=ids.numpy().tobytes(), top_k=ids.shape[1])


def recorded_ids(recorded: Recorded, problem: Problem, tokens: int) -> Tensor:
    """int32 [tokens, top_k], begun again where the record ends; of a grouped_gemm [tokens, 1], a row for every pair."""
    ids = torch.frombuffer(bytearray(recorded.ids), dtype=torch.int32).view(-1, recorded.top_k)
    if problem.op == "grouped_gemm":
        ids = ids[ids >= 0].view(-1, 1)
    return ids.repeat(-(-tokens // ids.shape[0]), 1)[:tokens]


def _wrong(path: Path, got: object, expected: object) -> InvalidInput:
    return InvalidInput(message(f"{path} is no recorded routing", got=got, expected=expected))


def _npy(path: Path) -> Tensor:
    import numpy as np

    ids = np.load(path, allow_pickle=False)
    return torch.from_numpy(np.ascontiguousarray(ids).astype(ids.dtype.newbyteorder("=")))


def _safetensors(path: Path) -> Tensor:
    from safetensors.torch import load_file

    found = load_file(path)
    if len(found) != 1 and NAME not in found:
        raise _wrong(path, f"tensors {', '.join(sorted(found)) or 'none'}", f"one tensor, or one named {NAME!r}")
    return found[NAME] if NAME in found else next(iter(found.values()))


def _json(path: Path) -> Tensor:
    rows = msgspec.json.decode(path.read_bytes(), type=list[list[int]])
    if len({len(row) for row in rows}) > 1:
        raise _wrong(path, "lists of different lengths", "as many experts for every token")
    return torch.tensor(rows, dtype=torch.int64)


READERS: dict[str, Callable[[Path], Tensor]] = {".npy": _npy, ".safetensors": _safetensors, ".json": _json}
