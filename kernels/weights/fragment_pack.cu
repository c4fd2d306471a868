// Fills a blob of a fragment layout (fragment.py) from a checkpoint's tensors: one weight, or a stack of experts.
//
// A CTA makes BLOCKS blocks that lie side by side along k; its warp w makes their subtiles w. Lane 4 g + q reads 8 bytes
// of rows g and g + 8 each: the 16 codes of step q, which have one scale, so that it can fold that scale's sign and zero
// by itself. Byte i of each 4 is for lane i of its quad. A transposition of the bytes within the lane makes a word for
// each of them, one of words between the four lanes gives each its own four, to be stored as 16 bytes.
//
// Scales that are NaN and global scales that are not positive and finite set a flag; their places are not kept.

#include "ptx.cuh"

struct Args {
    const u8* weight;    // [E, n, K/2]
    const u8* scale;     // [E, n, K/16]
    const u32* factors;  // global scales, [factor_count] float32
    u8* out;             // [gridDim.z, gridDim.y, k_blocks, BLOCK_BYTES]
    u32* flag;           // becomes 1, or stays as it is
    u32 n;
    u32 groups;  // K/16
    u32 k_blocks;
    u32 factor_count;
    u32 gated;  // rows g of a subtile are of the first half of n, rows g + 8 of the second
};

constexpr u32 BLOCKS = 4, WARPS = 4;
constexpr u32 SUBTILE_BYTES = 576, CODE_BYTES = 512, BLOCK_BYTES = WARPS * SUBTILE_BYTES;
constexpr u32 FULL = 0xffffffffu;

enum Encoding { BF16, FP16, NIB };

static_assert(ENCODING == BF16 || ENCODING == FP16 || ENCODING == NIB, "ENCODING");

DEVICE u32 moved(u32 x, int left, u32 mask) { return __funnelshift_l(x, x, left) & mask; }

// From a byte for each register, its low half in the low nibble, to the word's bits.
DEVICE u32 encode(u32 nibbles) {
    if (ENCODING == NIB) return nibbles;
    const u32 low = nibbles & 0x0F0F0F0Fu, high = (nibbles >> 4) & 0x0F0F0F0Fu;
    // As in the word, the bits of the two halves of a register are 16 apart: bits 0 and 16 on are register 0 (2), bits
    // 8 and 24 on register 1 (3).
    const u32 a = __byte_perm(low, high, 0x5410), b = __byte_perm(low, high, 0x7632);
    if (ENCODING == BF16)
        return moved(a, 12, 0x80008000u) | moved(a, 6, 0x01C001C0u) |       // register 0: 15 8 7 6
               moved(a, 0, 0x08000800u) | moved(a, 26, 0x001C001Cu) |       // 1: 11 4 3 2
               moved(b, 18, 0x00200020u) | moved(b, 12, 0x70007000u) |      // 2: 21 14 13 12
               moved(b, 6, 0x00020002u) | moved(b, 0, 0x06000600u) | moved(b, 24, 0x00010001u);  // 3: 17 10 9 0
    return moved(a, 12, 0x80008000u) | moved(a, 9, 0x0C000C00u) | moved(a, 7, 0x00800080u) |     // 0: 15 11 10 7
           moved(a, 2, 0x20002000u) | moved(a, 4, 0x50005000u) | moved(a, 31, 0x01000100u) |     // 1: 13 14 8 12
           moved(b, 6, 0x02000200u) | moved(b, 3, 0x00380038u) |                                 // 2: 9 5 4 3
           moved(b, 11, 0x00400040u) | moved(b, 8, 0x00070007u);                                 // 3: 22 18 17 16
}

// Bits 7 to 14 of |scale| * 2^7 as float16: a normal e4m3's exponent grows by 15, a subnormal one becomes normal.
DEVICE u32 scale_code(u32 byte) {
    const u32 subnormal = __byte_perm(0x74706800u, 0x7E7C7A78u, byte & 7);
    return byte & 0x78 ? (byte & 0x7F) + 120 : subnormal;
}

// A scale's sign and zero, moved to its codes.
DEVICE u32 folded(u32 codes, u32 byte) {
    const u32 signs = byte & 0x80 ? 0x88888888u : 0;
    return byte & 0x7F ? codes ^ signs : 0;
}

// Lanes that differ in BIT exchange: the one without it gives `high` for `low` of the other.
template <u32 BIT>
DEVICE void exchange(u32& low, u32& high, bool has) {
    const u32 other = __shfl_xor_sync(FULL, has ? low : high, BIT);
    if (has)
        low = other;
    else
        high = other;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 8) fragment_pack(const __grid_constant__ Args a) {
    const u32 warp = uniform_warp(), lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 subtile = blockIdx.y * WARPS + warp, first_block = blockIdx.x * BLOCKS;

    const u32 first = a.gated ? subtile * 8 + g : subtile * 16 + g;
    const u32 rows[2] = {first, first + (a.gated ? a.n / 2 : 8)};
    const bool inside[2] = {first < (a.gated ? a.n / 2 : a.n), first + (a.gated ? 0 : 8) < (a.gated ? a.n / 2 : a.n)};

    uint2 codes[BLOCKS][2];
    u32 scales[BLOCKS][2];
#pragma unroll
    for (u32 b = 0; b < BLOCKS; b++) {
        const u32 group = (first_block + b) * 4 + q;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            codes[b][h] = make_uint2(0, 0), scales[b][h] = 0;
            if (inside[h] && group < a.groups) {
                const u64 at = ((u64)blockIdx.z * a.n + rows[h]) * a.groups + group;
                codes[b][h] = __ldg((const uint2*)a.weight + at);
                scales[b][h] = __ldg(a.scale + at);
            }
        }
    }

    bool wrong = false;
    const u32 cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const u32 ctas = gridDim.x * gridDim.y * gridDim.z;
    for (u32 i = cta * (WARPS * 32) + threadIdx.x; i < a.factor_count; i += ctas * (WARPS * 32))
        wrong |= __ldg(a.factors + i) - 1 >= 0x7F7FFFFFu;  // zero, infinite, NaN or negative

    const bool bit0 = q & 1, bit1 = q & 2;
    const u64 row_block = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    u8* out = a.out + (row_block * a.k_blocks + first_block) * BLOCK_BYTES + warp * SUBTILE_BYTES;
#pragma unroll
    for (u32 b = 0; b < BLOCKS; b++) {
        if (first_block + b >= a.k_blocks) break;
        const u32 low = scales[b][0], high = scales[b][1];
        wrong |= (low & 0x7F) == 0x7F || (high & 0x7F) == 0x7F;

        const u32 r0 = folded(codes[b][0].x, low), r1 = folded(codes[b][1].x, high);
        const u32 r2 = folded(codes[b][0].y, low), r3 = folded(codes[b][1].y, high);
        const u32 r01 = __byte_perm(r0, r1, 0x5140), r23 = __byte_perm(r2, r3, 0x5140);  // bytes 0 and 1 of each
        const u32 s01 = __byte_perm(r0, r1, 0x7362), s23 = __byte_perm(r2, r3, 0x7362);  // 2 and 3
        uint4 v = make_uint4(encode(__byte_perm(r01, r23, 0x5410)), encode(__byte_perm(r01, r23, 0x7632)),
                             encode(__byte_perm(s01, s23, 0x5410)), encode(__byte_perm(s01, s23, 0x7632)));
        exchange<1>(v.x, v.y, bit0), exchange<1>(v.z, v.w, bit0);
        exchange<2>(v.x, v.z, bit1), exchange<2>(v.y, v.w, bit1);
        *(uint4*)(out + lane * 16) = v;

        const u32 pair = scale_code(low) | scale_code(high) << 16;  // of group q
        const u32 next = __shfl_xor_sync(FULL, pair, 1);
        if (!bit0) *(u32*)(out + CODE_BYTES + g * 8 + q * 2) = pair | next << 8;
        out += BLOCK_BYTES;
    }
    if (wrong) *a.flag = 1;
}
