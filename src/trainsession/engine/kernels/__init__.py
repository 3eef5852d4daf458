"""Kernels for CUDA, each beside its twin in plain torch, which runs everywhere and which tests compare with."""
