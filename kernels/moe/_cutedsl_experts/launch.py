"""Host side: what is compiled, and how a call is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...cuda.launch import CudaLaunch
from ...cuda.tensor_map import TensorMaps
from ...cutedsl import compile_cutedsl
from ...gemm._cutedsl_wgmma.shape import BLOCK
from ...problem import Device
from ...weights.fragment import padded
from .shape import ExpertShape

if TYPE_CHECKING:
    from torch import Tensor

    from ..activations import Constants
    from ..cuda_routing import Tiles

__all__ = ["FIELDS", "ProductLaunch", "arguments", "source_files"]

# The kernel's parameters, in the order of its signature: map of x, its shape, eleven addresses, ten integers, three
# constants of the activation.
FIELDS = ("128s", "2i", *"PPPPPPPPPPP", *"iiiiiiiiii", *"fff")
NO_MAP = bytes(128)
PIECE_VALUES = 8  # of 16 bytes
NO_CONSTANTS = (0.0, 0.0, 0.0)


class ProductLaunch:
    """One product of experts, compiled.

    Parameters
    ----------
    device, shape
        What to compile for, and what.
    rows, k
        Of an expert's weight; rows padded.
    n
        Columns of the result.
    band
        Tiles that advance together.
    pdl
        It may start while the kernel before it still runs.
    """

    def __init__(self, device: Device, shape: ExpertShape, *, rows: int, k: int, n: int, band: int, pdl: bool) -> None:
        self.shape = shape
        self._most = device.units * shape.blocks_per_sm
        self._row_tiles = -(-rows // shape.rows)
        self._n, self._blocks, self._k_blocks, self._band = n, rows // BLOCK, padded(k) // BLOCK, band
        self.compiled = compile_cutedsl(
            lambda: arguments(shape), device.capability, key=f"cutedsl_experts {shape}", sources=source_files()
        )
        self._launch = CudaLaunch(
            self.compiled,
            fields=FIELDS,
            block=shape.threads,
            smem_bytes=shape.smem_bytes,
            pdl=pdl,
            prefer_smem=True,
        )
        self._maps = TensorMaps("float16" if shape.float16 else "bfloat16", shape.box_tokens)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        global_scale: Tensor,
        tiles: Tiles,
        out: Tensor,
        *,
        turn: int = 0,
        bias: Tensor | None = None,
        pairs: Tensor | None = None,
        factors: Tensor | None = None,
        vector: Tensor | None = None,
        constants: Constants = NO_CONSTANTS,
        top_k: int = 0,
    ) -> None:
        """One launch, on the current stream.

        Parameters
        ----------
        x
            [rows, K] in the order of positions, or where rows are gathered [T, K]; rows begin on 16-byte boundaries.
        weight, global_scale
            Blobs of all experts; float32 [E, 1] or [E, 2].
        tiles
            Of `shape.tokens` rows at most.
        out
            By position [rows, n] in x's dtype, or of "summand" by pair [pairs, n] in float32.
        turn
            0 or 1: of two products of the same tiles each has a number of tiles taken.
        bias
            [E, n], behind a gate [E, 2 n]; in x's dtype or float32.
        pairs
            Int32, by position: the row of out, of "summand"; and where rows are gathered, top_k times the row of x.
        factors
            Float32, by position: the router's weights on the input. Of "activated" only, and not of gathered rows.
        vector
            [n] or [E, n] in x's dtype: multiplies what was activated and rounded.
        constants
            Of the activation.
        top_k
            Where rows are gathered.
        """
        m, k = x.shape
        gathered, stride = self.shape.gathered, x.stride(0) if m > 1 else k
        self._launch.launch(
            min(self._most, tiles.most_tiles * self._row_tiles),
            1,
            1,
            torch._C._cuda_getCurrentRawStream(x.get_device()),
            NO_MAP if gathered else self._maps.get(x.data_ptr(), m, k, stride),
            m,
            k,
            x.data_ptr() if gathered else 0,
            weight.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            _address(bias),
            tiles.tiles.data_ptr(),
            tiles.count.data_ptr(),
            tiles.count.data_ptr() + 4 * (1 + turn),
            _address(pairs),
            _address(factors),
            _address(vector),
            self._n,
            self._blocks,
            self._k_blocks,
            global_scale.shape[1],
            0 if bias is None else 1 if bias.dtype == x.dtype else 2,
            self._n if vector is not None and vector.ndim == 2 else 0,
            self._band,
            k,
            stride // PIECE_VALUES,
            top_k,
            *constants,
        )

    def load(self, index: int) -> None:
        """Onto a device."""
        self._launch.load(index)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def source_files() -> tuple[Path, ...]:
    """Device code with its pure arithmetic; not the launchers."""
    own = Path(__file__).parent
    shared = own.parents[1] / "gemm" / "_cutedsl_wgmma"
    files = (path for folder in (own, shared) for path in sorted(folder.glob("*.py")))
    return tuple(path for path in files if path.stem not in ("__init__", "launch"))


def arguments(shape: ExpertShape) -> tuple[Any, tuple[Any, ...]]:
    """What CuTe DSL compiles: the kernel of a shape, and arguments that only have types."""
    import cuda.bindings.driver as cuda
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_ptr

    from ...gemm._cutedsl_wgmma.work import element
    from .kernel import Product

    x = make_ptr(element(shape), 16, cute.AddressSpace.gmem, assumed_align=16)
    return Product(shape), (x, Int32(1), Int32(16), cuda.CUstream(0))
