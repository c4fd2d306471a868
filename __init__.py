"""nvfp4: kernel autotuning and dispatch for W4A16 NVFP4 inference."""
