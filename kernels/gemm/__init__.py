"""Candidates of the gemm op: one spec file each."""
