"""cuBLAS with the global scale applied where it is exact: to the float32 accumulator, read from device memory.

`torch.mm` can only scale by a host number, and reading the global scale on the host would stop a CUDA graph from seeing
an updated one. So this calls `cublasGemmEx` of the cuBLAS that torch has loaded, on torch's own handle (its stream and
workspace included), with alpha and beta in device memory. Rounding the scaled weights to 16 bits instead, as is common,
adds a second error as large as that of rounding the result.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ..errors import Nvfp4Error, message

__all__ = ["scaled_mm"]

CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F, ALGO_DEFAULT, OP_N, OP_T = 68, -1, 0, 1
POINTER_HOST, POINTER_DEVICE = 0, 1
DEFAULT_MATH, NO_REDUCED_PRECISION_REDUCTION = 0, 16


@cache
def _library() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.cublasGemmEx.argtypes = [
        pointer, integer, integer, integer, integer, integer, pointer,  # handle, op, op, m, n, k, alpha
        pointer, integer, integer, pointer, integer, integer,  # A, type, ld, B, type, ld
        pointer, pointer, integer, integer, integer, integer,  # beta, C, type, ld, compute, algorithm
    ]  # fmt: skip
    library.cublasSetPointerMode_v2.argtypes = [pointer, integer]
    library.cublasSetMathMode.argtypes = [pointer, integer]
    return library


@cache
def _zero_and_one(device: torch.device) -> Tensor:
    return torch.tensor([0.0, 1.0], dtype=torch.float32, device=device)


def prepare(device: torch.device) -> None:
    """Load the library and the constants; must happen before a capture."""
    _library()
    _zero_and_one(device)


def scaled_mm(x: Tensor, w: Tensor, scale: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """out = scale * (x @ w.T) (+ out when accumulating), in float32 with one rounding to out's dtype.

    Parameters
    ----------
    x
        [M, K] bfloat16 or float16, rows contiguous.
    w
        [N, K] in x's dtype, contiguous.
    scale
        float32 [1] on the device.
    out
        [M, N] in x's dtype; rows may be strided.

    Raises
    ------
    Nvfp4Error
        cuBLAS returned an error status.
    """
    library, constants = _library(), _zero_and_one(x.device)
    handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    dtype = CUDA_TYPES[x.dtype]
    (m, k), n = x.shape, w.shape[0]
    beta = constants.data_ptr() + (4 if accumulate else 0)
    library.cublasSetPointerMode_v2(handle, POINTER_DEVICE)
    library.cublasSetMathMode(handle, NO_REDUCED_PRECISION_REDUCTION)
    # Row-major out [M, N] is column-major [N, M]: out^T = w . x^T.
    status = library.cublasGemmEx(
        handle, OP_T, OP_N, n, m, k, scale.data_ptr(),
        w.data_ptr(), dtype, k, x.data_ptr(), dtype, x.stride(0) if m > 1 else k,
        beta, out.data_ptr(), dtype, out.stride(0) if m > 1 else n, COMPUTE_32F, ALGO_DEFAULT,
    )  # fmt: skip
    library.cublasSetMathMode(handle, DEFAULT_MATH)
    library.cublasSetPointerMode_v2(handle, POINTER_HOST)
    if status:
        raise Nvfp4Error(message("cublasGemmEx failed", got=f"status {status} for M={m} N={n} K={k} {x.dtype}"))
