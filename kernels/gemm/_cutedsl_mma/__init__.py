"""Device code of `cutedsl_mma`. `shape` and `index` need no CuTe DSL; everything else is imported to compile."""
