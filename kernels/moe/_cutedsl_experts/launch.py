"""Host side: what is compiled, and how a call is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...cuda.launch import CudaLaunch
from ...cuda.tensor_map import TensorMaps
from ...cutedsl import compile_cutedsl
from ...problem import Device
from .shape import ExpertShape

__all__ = ["FIELDS", "ProductLaunch", "arguments"]

# The kernel's parameters, in the order of its signature: map of x, its shape, nine addresses, seven integers, three
# constants of the activation.
FIELDS = ("128s", "2i", *"PPPPPPPPP", *"iiiiiii", *"fff")


def arguments(shape: ExpertShape) -> tuple[Any, tuple[Any, ...]]:
    """What CuTe DSL compiles: the kernel of a shape, and arguments that only have types."""
    import cuda.bindings.driver as cuda
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_ptr

    from ...gemm._cutedsl_wgmma.work import element
    from .kernel import Product

    x = make_ptr(element(shape), 16, cute.AddressSpace.gmem, assumed_align=16)
    return Product(shape), (x, Int32(1), Int32(16), cuda.CUstream(0))
