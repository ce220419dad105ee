"""What benchmarks on CPUs set before they import torch and DeepSpeed, which read it then."""

from __future__ import annotations

import os


def compute_on_cpu(threads: int) -> None:
    """In this process and in those that it starts."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["DS_ACCELERATOR"] = "cpu"
