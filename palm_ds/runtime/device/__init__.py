"""The device: its memory, its peak figures, caches of compiled kernels."""
