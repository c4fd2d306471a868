"""Device code of the kernels that read fragment layouts: decoding blocks, `triton_fused_fragment`, `two_pass_fragment`.

A block is 64 rows by 64 k: four subtiles of 16 rows, each 576 bytes. Its first 512 bytes are 32-bit words, one per row
pair (r, r + 8), quad member q and k16 step j; a word holds what four registers of a tensor core's first operand hold:
R[h + 2 e] is row r + 8 h, k = 16 j + 2 q + 8 e and its neighbour. The last 64 bytes are scale words, one per row pair
and two k16 steps. So a tile of words decodes in place, thread by thread, into the dot's operand.

Words of a block are read as [32, 16]: row pair 8 * subtile + g, then 4 q + j. A decoded element is code * scale * 2^-7,
exact in bfloat16 and in float16, as in `_triton_decode`.
"""

import triton
import triton.language as tl

from ._triton_decode import INTERPRET, reduce_splits, rounded, store_tile

BLOCK_WORDS = tl.constexpr(576)  # 2304 bytes
SUBTILE_WORDS = tl.constexpr(144)
CODE_WORDS = tl.constexpr(128)  # of a subtile; its scales are behind them
ROT9, ROT10, NIB = tl.constexpr("bf16"), tl.constexpr("fp16"), tl.constexpr("nib")  # the ids' last parts


def _product_asm(half: int, suffix: str) -> str:
    """PTX for a register of two raw weights in $2 and the scales of rows r, r + 8 in $3: two products."""
    return "\n".join(
        [
            "{",
            ".reg .b16 low, high;",
            ".reg .b32 scale, zero, pair;",
            "mov.b32 {low, high}, $3;",
            "mov.b32 scale, {low, low};" if half == 0 else "mov.b32 scale, {high, high};",
            "mov.b32 zero, 0x80008000;",
            f"fma.rn.{suffix} pair, $2, scale, zero;",  # adds -0: sm_80 has no packed bfloat16 multiply
            "mov.b32 {$0, $1}, pair;",
            "}",
        ]
    )


BF16_0, BF16_1 = tl.constexpr(_product_asm(0, "bf16x2")), tl.constexpr(_product_asm(1, "bf16x2"))
FP16_0, FP16_1 = tl.constexpr(_product_asm(0, "f16x2")), tl.constexpr(_product_asm(1, "f16x2"))


@triton.jit
def nibble_pair(word, REGISTER: tl.constexpr, MASK: tl.constexpr, PLACE: tl.constexpr):
    """Byte REGISTER of a word: its low nibble to the low half, its high nibble to the high one, exponents at PLACE."""
    byte = (word >> (8 * REGISTER)) & 0xFF
    pair = byte | (byte << 12)
    return ((pair << 12) & 0x80008000) | ((pair << PLACE) & MASK)


@triton.jit
def raw_registers(word, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """uint32 words -> four uint32 registers of two raw weights: code * 2^-126 as bfloat16, * 2^-14 as float16."""
    if ENCODING == ROT9:
        r0 = word & 0x81C081C0
        r1 = (word << 4) & 0x81C081C0
        r2 = ((word << 26) | (word >> 6)) & 0x81C081C0
        r3 = (((word << 30) | (word >> 2)) & 0x81808180) | ((word << 6) & 0x00400040)
    elif ENCODING == ROT10:
        up = word << 2
        down = (word << 29) | (word >> 3)
        r0 = (word & 0x8C008C00) | (up & 0x02000200)
        r1 = (up & 0x84008400) | (down & 0x0A000A00)
        r2 = (word << 6) & 0x8E008E00
        r3 = ((word << 25) | (word >> 7)) & 0x8E008E00
    elif DTYPE == tl.bfloat16:
        r0 = nibble_pair(word, 0, 0x01C001C0, 6)
        r1 = nibble_pair(word, 1, 0x01C001C0, 6)
        r2 = nibble_pair(word, 2, 0x01C001C0, 6)
        r3 = nibble_pair(word, 3, 0x01C001C0, 6)
    else:
        r0 = nibble_pair(word, 0, 0x0E000E00, 9)
        r1 = nibble_pair(word, 1, 0x0E000E00, 9)
        r2 = nibble_pair(word, 2, 0x0E000E00, 9)
        r3 = nibble_pair(word, 3, 0x0E000E00, 9)
    return r0, r1, r2, r3


@triton.jit
def scale_pairs(word, DTYPE: tl.constexpr):
    """uint32 scale words -> scales of rows r, r + 8 for the even and the odd k16 step, in a register each.

    As bfloat16 scale * 2^119, as float16 (and always under the interpreter) scale * 2^7. A zero scale has only zero
    codes, so what it decodes to does not matter.
    """
    if DTYPE == tl.bfloat16 and not INTERPRET:
        even = ((word << 4) & 0x0FF00FF0) | 0x70007000
        odd = ((word >> 4) & 0x0FF00FF0) | 0x70007000
    else:
        even = (word << 7) & 0x7F807F80
        odd = (word >> 1) & 0x7F807F80
    return even, odd


@triton.jit
def half_value(register, HALF: tl.constexpr):
    """float32 of the float16 in one half of a register."""
    return ((register >> (16 * HALF)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def products(raw, scale, ROW: tl.constexpr, DTYPE: tl.constexpr):
    """Both weights of a raw register times the scale of row r + 8 * ROW, side by side (float32 when interpreted)."""
    if INTERPRET:
        if DTYPE == tl.bfloat16:  # bfloat16 subnormals are wrong there: the same bits three places up are float16
            raw = (raw & 0x80008000) | ((raw & 0x01C001C0) << 3)
        factor = half_value(scale, ROW)  # * 2^7, the raw weight * 2^-14
        low = half_value(raw, 0) * factor
        high = half_value(raw, 1) * factor
    else:
        if DTYPE == tl.bfloat16:
            if ROW == 0:
                low, high = _products(BF16_0, raw, scale)
            else:
                low, high = _products(BF16_1, raw, scale)
        else:
            if ROW == 0:
                low, high = _products(FP16_0, raw, scale)
            else:
                low, high = _products(FP16_1, raw, scale)
        low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _products(ASM: tl.constexpr, raw, scale):
    return tl.inline_asm_elementwise(ASM, "=h,=h,r,r", [raw, scale], dtype=(tl.int16, tl.int16), is_pure=True, pack=1)


@triton.jit
def decoded_tile(
    words,  # [BLOCKS, BN / 2, 16] int32
    scales,  # [BLOCKS, BN / 2, 2] int32
    ENCODING: tl.constexpr,
    DTYPE: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Weights [BN, 64 * BLOCKS], code * scale * 2^-7, rows and k in order (float32 when interpreted)."""
    word = tl.reshape(words.to(tl.uint32, bitcast=True), (BLOCKS, BN // 2, 4, 4))  # q, j
    even, odd = scale_pairs(scales.to(tl.uint32, bitcast=True), DTYPE)
    scale = tl.reshape(tl.join(even, odd), (BLOCKS, BN // 2, 1, 4)).broadcast_to(word.shape)
    r0, r1, r2, r3 = raw_registers(word, ENCODING, DTYPE)
    first = tl.join(products(r0, scale, 0, DTYPE), products(r2, scale, 0, DTYPE))
    second = tl.join(products(r1, scale, 1, DTYPE), products(r3, scale, 1, DTYPE))
    tile = tl.reshape(tl.join(first, second), (BLOCKS, BN // 16, 8, 4, 4, 2, 2, 2))  # subtile, g, q, j, pair, e, h
    return tl.reshape(tl.permute(tile, (1, 7, 2, 0, 4, 6, 3, 5)), (BN, 64 * BLOCKS))


@triton.jit
def waited(acc):
    """acc, used by assembly that does nothing: before a use in the loop Triton waits for all wgmmas that add to it.

    Otherwise some of a step's wgmmas are in flight when the next begins. In PTX that is sound, but ptxas 12.8 does not
    look beyond the loop's end, and decodes the next weights in registers that those in flight have yet to read. On an
    H200 (Triton 3.6.0, 2026-11) 20 configs were wrong in rare elements, of the 33 with 64 or more tokens and 3 or more
    stages that were measured. Others have the same fault in their machine code, and luck: their wgmmas are short, or a
    step begins by waiting for a copy. docs/notes/triton-on-hopper.md has the rest.
    """
    return tl.inline_asm_elementwise("// waited", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fused_fragment_gemm(
    x_ptr,  # [M, K] bfloat16 or float16, rows 8 * x_stride8 apart
    weight_ptr,  # [N up to 64s, K up to 64s, 2304 bytes] uint8
    scale_ptr,  # the same blob: a block holds its scales
    global_scale_ptr,  # [1] or [N] float32
    bias_ptr,  # [N] like x; read when bias_kind is 1
    float_bias_ptr,  # [N] float32; read when bias_kind is 2
    out_ptr,  # [M, N] like x
    partial_ptr,  # [tiles, splits, BN * BM] float32
    counter_ptr,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    scale_stride,  # 0: one global scale, 1: one per row
    bias_kind,  # 0: none
    x_stride8,  # in eights of elements: what makes 16-byte copies possible
    ENCODING: tl.constexpr,
    BM: tl.constexpr,  # tokens per tile
    BN: tl.constexpr,  # weight rows per tile, a multiple of 64
    BLOCKS: tl.constexpr,  # blocks of 64 k per step
    GROUP: tl.constexpr,  # row tiles that stay together while token tiles advance
    WGMMA: tl.constexpr,  # the tensor core reads registers while the program runs on: Hopper
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 64 * BLOCKS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tiles = tl.cdiv(N, BN)
    token_tiles = tl.cdiv(M, BM)
    group = tile // (GROUP * token_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + (tile % (GROUP * token_tiles)) % height
    token_tile = (tile % (GROUP * token_tiles)) // height

    k_blocks = tl.cdiv(K, 64)
    steps = tl.cdiv(k_blocks, BLOCKS)
    steps_here = tl.cdiv(steps, tl.num_programs(1))
    begin = split * steps_here
    end = tl.minimum(begin + steps_here, steps)

    # Blocks beyond the weight repeat the last one: their rows are not stored, and x is zero beyond K.
    pair = tl.arange(0, BN // 2)[None, :, None]
    n64 = tl.minimum(row_tile * (BN // 64) + pair // 32, tl.cdiv(N, 64) - 1)
    subtile = n64.to(tl.int64) * k_blocks * BLOCK_WORDS + pair % 32 // 8 * SUBTILE_WORDS
    blob = weight_ptr.to(tl.pointer_type(tl.int32))
    code_ptrs = blob + (subtile + pair % 8 * 16) + tl.arange(0, 16)[None, None, :]
    scale_ptrs = scale_ptr.to(tl.pointer_type(tl.int32)) + (subtile + CODE_WORDS + pair % 8 * 2)
    scale_ptrs += tl.arange(0, 2)[None, None, :]
    block = tl.arange(0, BLOCKS)[:, None, None]

    tokens = token_tile * BM + tl.arange(0, BM)
    x_rows = tl.minimum(tokens, M - 1).to(tl.int64) * x_stride8 * 8
    inner = tl.arange(0, STEP)
    x_ptrs = x_ptr + x_rows[:, None] + inner[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = tl.minimum(step * BLOCKS + block, k_blocks - 1) * BLOCK_WORDS
        words = tl.load(code_ptrs + at)
        scales = tl.load(scale_ptrs + at)
        x = tl.load(x_ptrs + step * STEP, mask=(step * STEP + inner < K)[None, :], other=0.0)
        w = decoded_tile(words, scales, ENCODING, DTYPE, BN, BLOCKS)
        if INTERPRET:
            x = x.to(tl.float32)  # the interpreter multiplies bfloat16 bit patterns
        acc = tl.dot(w, tl.trans(x), acc)
        if WGMMA and not INTERPRET:
            acc = waited(acc)

    offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    acc, last = reduce_splits(acc, offsets, partial_ptr, counter_ptr, tile, split, tl.num_programs(1), BM * BN)
    if last:
        rows = (row_tile * BN + tl.arange(0, BN))[:, None]
        store_tile(
            acc, tokens[None, :], rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind,
            M, N,
        )  # fmt: skip


@triton.jit
def dequantise_fragment(
    weight_ptr,  # [rows up to 64s / 64, K up to 64s / 64, 2304 bytes] uint8: the blocks of this chunk's rows
    out_ptr,  # [rows, K] bfloat16 or float16: code * block scale, exact
    rows,
    K,
    ENCODING: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 64 k, per program; of each one subtile
    ROWS: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PARTS: tl.constexpr = 64 // ROWS
    k_blocks = tl.cdiv(K, 64)
    k_tiles = tl.cdiv(k_blocks, BLOCKS)
    part = tl.program_id(0) % PARTS
    first = tl.program_id(0) // PARTS % k_tiles * BLOCKS
    n64 = tl.program_id(0) // PARTS // k_tiles
    block = tl.minimum(first + tl.arange(0, BLOCKS)[:, None, None], k_blocks - 1)
    pair = tl.arange(0, ROWS // 2)[None, :, None]
    at = (n64.to(tl.int64) * k_blocks + block) * BLOCK_WORDS + (part * (ROWS // 16) + pair // 8) * SUBTILE_WORDS
    blob = weight_ptr.to(tl.pointer_type(tl.int32))
    # Words last: the compiler keeps the layout of the load that comes last, and scales are the cheaper ones to move.
    scales = tl.load(blob + at + CODE_WORDS + pair % 8 * 2 + tl.arange(0, 2)[None, None, :])
    words = tl.load(blob + at + pair % 8 * 16 + tl.arange(0, 16)[None, None, :])
    w = decoded_tile(words, scales, ENCODING, DTYPE, ROWS, BLOCKS)
    row = (n64 * 64 + part * ROWS + tl.arange(0, ROWS))[:, None]
    k = (first * 64 + tl.arange(0, 64 * BLOCKS))[None, :]
    value = rounded(w * 128.0, DTYPE) if INTERPRET else (w * 128.0).to(DTYPE)
    tl.store(out_ptr + row.to(tl.int64) * K + k, value, mask=(row < rows) & (k < K))
