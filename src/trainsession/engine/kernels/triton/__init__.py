"""The kernels' own source; importing a module of this folder needs Triton."""
