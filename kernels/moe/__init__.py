"""Candidates of the ops grouped_gemm and moe; the registry finds every module here that has a KERNEL."""
