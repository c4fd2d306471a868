"""`two_pass_moe_fragment`: `two_pass_moe` from the fragment layout. Only pass one differs."""

from __future__ import annotations

from ..kernel import Kernel
from .two_pass_moe import TwoPassMoe


class TwoPassMoeFragment(TwoPassMoe):
    """See the module."""

    name = "two_pass_moe_fragment"
    fragments = True


KERNEL: Kernel = TwoPassMoeFragment()
