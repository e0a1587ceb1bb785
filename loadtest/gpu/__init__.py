"""Measurements on a GPU, and the compilation of GPU kernels without one."""
