"""Kernels written in Triton: run on a GPU, interpreted on a CPU, and who may run."""
