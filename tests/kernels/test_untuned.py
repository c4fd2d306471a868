"""Ranges that kernels are made for. Layouts: see tests/dispatch/test_layout.py."""

from types import SimpleNamespace

import pytest
from nvfp4.kernels.untuned import OPEN, made_for_width


@pytest.mark.parametrize(
    ("ranges", "m", "width"),
    [
        (((1, 1),), 1, 0),
        (((1, 1),), 2, None),
        (((1, 64), (8, 16)), 16, 8),
        (((1, 64), (8, 16)), 17, 63),
        (((192, None),), 192, OPEN - 192),
        (((192, None),), 191, None),
        ((), 1, None),
    ],
)
def test_the_narrowest_range_around_m(ranges, m, width):
    assert made_for_width(SimpleNamespace(made_for=ranges), m) == width


def test_of_open_ranges_the_one_that_begins_later_is_the_narrower():
    early, late = (made_for_width(SimpleNamespace(made_for=((low, None),)), 4096) for low in (1, 192))
    assert late < early
