"""The fragment layouts: codes in the order in which tensor-core instructions take them from registers.

A weight [N, K], padded to multiples of 64 with zeros, is cut into blocks of 64 x 64, a block into four subtiles of 16
rows. A subtile is 576 consecutive bytes: 512 of codes, then 64 of scales. Its codes are 32 lanes of four 32-bit words;
word j of a lane holds what that lane multiplies in the j-th step of 16 along k: the eight codes of four registers of
two halves each. Register h + 2 e, half p is row g + 8 h, k = 2 q + 8 e + p of the step, for lane 4 g + q.

The three layouts differ in where a word keeps the bits of each code: so that a few shifts and masks make bfloat16 or
float16 bit patterns of them ("bf16", "fp16"), or in plain nibbles, for hardware that converts those itself ("nib").

Scales are stored with sign bit and lowest exponents gone (see `scale_codes`); a negative one has its sign moved to its
16 codes, and the codes under a zero are zero.

In a "-glu" layout, for the first weight of gated experts, gate rows and up rows lie in turns of eight: row g of a
subtile is a gate row, row g + 8 the same row of up, and one lane holds both. Each half is padded to a multiple of 32.

`fragment_bytes` has the conversions, `fragment_pack` the one that runs on GPUs.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...errors import InvalidInput, message
from ..problem import DTYPES
from .codec import GROUP
from .fragment_bytes import BLOCK_BYTES, CODE_BYTES, SUBTILE_BYTES, TILE, fill, read, scale_codes
from .fragment_pack import compile_pack, finish, launcher, start
from .layouts import GLU, Layout
from .weight import Weight, check_values, is_aligned

__all__ = [
    "BLOCK_BYTES",
    "CODE_BYTES",
    "LAYOUTS",
    "SUBTILE_BYTES",
    "TILE",
    "blob_shape",
    "compile_packing",
    "fragment_id",
    "pack",
    "padded",
    "scale_codes",
    "to_checkpoint",
]


def padded(n: int) -> int:
    """The next multiple of 64."""
    return -(-n // TILE) * TILE


def blob_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of the data of a weight [n, k]; of a gated one too: two halves rounded up to 32 are n rounded up to 64."""
    return padded(n) // TILE, padded(k) // TILE, BLOCK_BYTES


def fragment_id(capability: tuple[int, int], dtype: str) -> str:
    """The fragment layout for a device and the dtype of x.

    Parameters
    ----------
    capability
        Compute capability; (0, 0) for a CPU.
    dtype
        "bfloat16" or "float16".

    Raises
    ------
    InvalidInput
        Another dtype.
    """
    if dtype not in DTYPES:
        raise InvalidInput(message("no fragment layout for this dtype", got=repr(dtype), expected=" or ".join(DTYPES)))
    if capability[0] >= 10:  # converts e2m1 in hardware
        return "fragment1-nib"
    return "fragment1-bf16" if dtype == "bfloat16" else "fragment1-fp16"


def compile_packing(capability: tuple[int, int]) -> None:
    """Compile what packs on a GPU of that capability, which need not be here; BuildError if that fails."""
    for layout_id in dict.fromkeys(fragment_id(capability, dtype) for dtype in DTYPES):
        compile_pack(layout_id.rpartition("-")[2], capability)


def pack(encoding: str, weight: Tensor, weight_scale: Tensor, global_scale: Tensor, *, gated: bool = False) -> Weight:
    """Validated tensors of a checkpoint as a blob; works where they are.

    Beside the blob it takes less memory than the weight has (half a MiB of tables apart).

    Parameters
    ----------
    encoding
        "bf16", "fp16" or "nib".
    weight, weight_scale, global_scale
        uint8 [N, K/2], uint8 [N, K/16], float32 [1] or [N]; or the same of experts, [E, N, K/2] and so on.
    gated
        Gate and up rows in turns.

    Returns
    -------
    Weight
        data uint8 [ceil(N/64), ceil(K/64), 2304], of experts with E in front; scale None.

    Raises
    ------
    InvalidInput
        A value that `check_values` refuses, or halves of a wrong number of rows.
    """
    device = weight.device
    launch = launcher(encoding, device)
    if launch is None:
        check_values(weight_scale, global_scale)
    *experts, n, k_bytes = weight.shape
    k = 2 * k_bytes
    if gated and n % (2 * GROUP):
        raise InvalidInput(
            message(
                "wrong number of rows of a gated weight",
                got=f"{n} in shape {tuple(weight.shape)}",
                expected=f"gate and up, each of a multiple of {GROUP} rows",
            )
        )
    if not is_aligned(global_scale):
        global_scale = global_scale.clone()
    data = weight.new_empty((*experts, *blob_shape(n, k)))
    if launch is None:
        stacks = (weight, weight_scale, data) if experts else (weight[None], weight_scale[None], data[None])
        fill(encoding, *stacks, gated=gated)
    else:
        flag = start(launch, weight, weight_scale, data, global_scale, gated=gated)
    packed = Weight(  # made while the GPU works; nothing that can fail lies between start and finish
        data=data,
        scale=None,
        global_scale=global_scale,
        layout=f"fragment1-{encoding}{GLU if gated else ''}",
        out_features=n,
        in_features=k,
    )
    if launch is not None and not finish(flag, device):
        check_values(weight_scale, global_scale)
        raise AssertionError("the kernel saw a wrong scale that is not there")
    return packed


def to_checkpoint(encoding: str, weight: Weight, *, gated: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack`: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], and the global scale itself."""
    experts = weight.data.ndim == 4
    data = weight.data if experts else weight.data[None]
    codes, scale = read(encoding, data, weight.out_features, weight.in_features, gated=gated)
    return (codes, scale, weight.global_scale) if experts else (codes[0], scale[0], weight.global_scale)


LAYOUTS = tuple(
    Layout(
        id=f"fragment1-{encoding}{GLU if gated else ''}",
        pack=partial(pack, encoding, gated=gated),
        to_checkpoint=partial(to_checkpoint, encoding, gated=gated),
        data_shape=blob_shape,
        dtypes=dtypes,
        experts=True,
        gated=gated,
        checks_values=True,
    )
    for encoding, dtypes in (("bf16", ("bfloat16",)), ("fp16", ("float16",)), ("nib", DTYPES))
    for gated in (False, True)
)
