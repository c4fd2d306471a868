"""CUDA C++ kernels: compiling them without a GPU, and launching them with little host work."""
