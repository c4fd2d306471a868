"""`two_pass_grouped_fragment`: `two_pass_grouped` from the fragment layout. Only pass one differs."""

from __future__ import annotations

from ..kernel import Kernel
from .two_pass_grouped import TwoPassGrouped


class TwoPassGroupedFragment(TwoPassGrouped):
    """See the module."""

    name = "two_pass_grouped_fragment"
    fragments = True


KERNEL: Kernel = TwoPassGroupedFragment()
