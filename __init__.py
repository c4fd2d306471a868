"""nvfp4: kernel autotuning and dispatch for W4A16 NVFP4 inference.

Importing it registers `torch.ops.nvfp4.gemm`, `gemm.out`, `grouped_gemm`, `moe` and `dequantize`; it makes no CUDA
context and loads none of the compilers, the database or the tuner.
"""

from . import nn
from .dispatch.convert import convert_
from .dispatch.expert_ops import grouped_gemm, moe
from .dispatch.ops import dequantize, gemm
from .dispatch.pack import pack
from .dispatch.table import UntunedWarning
from .dispatch.warmup import warmup
from .errors import BuildError, DatabaseError, InvalidInput, LaunchError, NoDevice, NotWarm, Nvfp4Error, Unsupported
from .kernels.problem import Problem
from .kernels.weights.codec import quantize
from .kernels.weights.weight import Weight

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "DatabaseError",
    "InvalidInput",
    "LaunchError",
    "NoDevice",
    "NotWarm",
    "Nvfp4Error",
    "Problem",
    "Unsupported",
    "UntunedWarning",
    "Weight",
    "__version__",
    "convert_",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "moe",
    "nn",
    "pack",
    "quantize",
    "warmup",
]
