"""Device code of `cutedsl_wgmma`. `shape` and `schedule` need no CuTe DSL; everything else is imported to compile."""
