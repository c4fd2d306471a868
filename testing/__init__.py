"""Helpers for tests of kernels, here and in other packages: closeness, and the conformance case."""

from .close import assert_gemm_close, assert_moe_close, relative_error, relative_tolerance

__all__ = ["assert_gemm_close", "assert_moe_close", "relative_error", "relative_tolerance"]
