"""Filling the blobs of fragment layouts on a GPU: one launch for a weight or a stack of experts.

The kernel also sees whether a block scale is NaN or a global scale not positive and finite, so that nothing else has to
read them. It says so in memory of the host, which is looked at once it is done.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...errors import BuildError, LaunchError, caller_level, message
from ..cuda.compile import Compiled, compile_cuda
from ..cuda.launch import CudaLaunch

__all__ = ["compile_pack", "finish", "launcher", "start"]

SOURCE = Path(__file__).with_suffix(".cu")
ARGS = "5P5I"  # struct Args of the source
ENCODINGS = ("bf16", "fp16", "nib")  # in the order of the source's enum
BLOCKS = 4  # of 64 x 64, side by side along k, that a CTA makes
THREADS = 128
LOAD_BYTES = 8

_flags: list[Tensor] = []  # in pinned memory, zero, and in nobody's use: pop and append are atomic
_warned = False


def launcher(encoding: str, device: torch.device) -> CudaLaunch | None:
    """What `start` launches there, or None where it cannot run; where it should but cannot, one warning says why.

    Parameters
    ----------
    encoding
        "bf16", "fp16" or "nib".
    """
    return _launch(encoding, _index(device)) if device.type == "cuda" else None


def start(
    launch: CudaLaunch, weight: Tensor, scale: Tensor, data: Tensor, global_scale: Tensor, *, gated: bool = False
) -> Tensor:
    """Launch what writes every byte of a blob, on the current stream; `finish` waits for it.

    Parameters
    ----------
    launch
        `launcher` of the encoding and the tensors' device.
    weight, scale
        uint8 [N, K/2] and the uint8 view of e4m3 [N, K/16], contiguous; of experts [E, N, K/2] and [E, N, K/16].
    data
        uint8 [n64, k64, 2304] or [E, n64, k64, 2304], contiguous.
    global_scale
        float32, contiguous, of any shape; only looked at.
    gated
        Rows are two halves, gate and up, that are laid in turns of eight.

    Returns
    -------
    Tensor
        A flag in memory of the host, for `finish`, which has to be called: the kernel may write to it until then.
    """
    index = weight.get_device()
    if weight.data_ptr() % LOAD_BYTES:
        weight = weight.clone()
    n = weight.shape[-2]
    *experts, row_blocks, k_blocks, _ = data.shape
    try:
        flag = _flags.pop()
    except IndexError:
        flag = _new_flag()
    arguments = (
        -(-k_blocks // BLOCKS),
        row_blocks,
        experts[0] if experts else 1,
        torch._C._cuda_getCurrentRawStream(index),
        weight.data_ptr(),
        scale.data_ptr(),
        global_scale.data_ptr(),
        data.data_ptr(),
        flag.data_ptr(),
        n,
        scale.shape[-1],
        k_blocks,
        global_scale.numel(),
        gated,
    )
    if torch.cuda.current_device() == index:
        launch.launch(*arguments)
    else:
        with torch.cuda.device(index):
            launch.launch(*arguments)
    return flag


def finish(flag: Tensor, device: torch.device) -> bool:
    """Wait for what `start` launched on this device, in the same stream.

    Returns
    -------
    bool
        Whether all block scales are finite and all global scales positive and finite. Else the blob is of no use.
    """
    torch.cuda.current_stream(device).synchronize()
    fine = int(flag) == 0
    if not fine:
        flag.zero_()
    _flags.append(flag)
    return fine


def _new_flag() -> Tensor:
    # Outlives the modes of its first caller: whoever comes next may write to it, and it is on the host.
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


def compile_pack(encoding: str, capability: tuple[int, int]) -> Compiled:
    """The kernel for a GPU that need not be here."""
    defines = {"ENCODING": ENCODINGS.index(encoding)}
    return compile_cuda(SOURCE, capability, entry="fragment_pack", defines=defines)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _launch(encoding: str, index: int) -> CudaLaunch | None:
    try:
        compiled = compile_pack(encoding, torch.cuda.get_device_capability(index))
        launch = CudaLaunch(compiled, fields=ARGS, block=THREADS, smem_bytes=0)
        launch.load(index)
    except (BuildError, LaunchError, ImportError) as error:
        _warn(error)
        return None
    return launch


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            message("weights are packed in torch operations, several times more slowly", got=str(error)),
            RuntimeWarning,
            stacklevel=caller_level(),
        )
