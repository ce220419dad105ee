"""The sections of benchmarks/gpu.py."""
