"""Device code of `cutedsl_grouped` and `cutedsl_moe`: what experts add to `gemm._cutedsl_wgmma`."""
