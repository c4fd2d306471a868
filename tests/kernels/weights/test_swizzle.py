"""The 128x4 scale order against its offset formula."""

import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels.weights.swizzle import swizzle, swizzled_shape, unswizzle

SIZES = [(n, c) for n in (1, 100, 128, 129, 300) for c in (1, 3, 4, 5, 6)]


def offset(row, column, columns):
    """The formula as the format states it."""
    tiles = -(-columns // 4)
    return (row // 128) * tiles * 512 + (column // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4


@pytest.mark.parametrize(("n", "columns"), SIZES)
def test_offsets_and_padding(n, columns):
    scale = torch.randint(1, 0x7F, (n, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    flat = swizzle(scale)
    right = torch.zeros(-(-n // 128) * 128 * -(-columns // 4) * 4, dtype=torch.uint8)
    for row in range(n):
        for column in range(columns):
            right[offset(row, column, columns)] = scale[row, column]
    assert torch.equal(flat, right)


@pytest.mark.parametrize(("n", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_inverse(n, columns, dtype):
    scale = torch.randint(0, 256, (n, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    flat = swizzle(scale.view(dtype))
    for shape in (flat.shape, swizzled_shape(n, columns)):
        back = unswizzle(flat.view(shape), n, columns)
        assert back.dtype == dtype
        assert back.is_contiguous()
        assert torch.equal(back.view(torch.uint8), scale)


def test_wrong_size_is_refused():
    with pytest.raises(InvalidInput, match="wrong size"):
        unswizzle(torch.zeros(100 * 6, dtype=torch.uint8), 100, 6)
