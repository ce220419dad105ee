"""Triton's interpreter, for tests of our own kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter multiplies bf16 as if it were integers: here, as fp32."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here: see test_attention_on_a_gpu")
    import triton.language as tl
    from triton import __version__
    from triton.runtime.interpreter import InterpreterBuilder

    if tuple(map(int, __version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of triton {__version__} does not work with NumPy 2.4")
    dot = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):  # noqa: ANN001, ANN002, ANN202
        if a.dtype == tl.bfloat16:
            a, b = (self.cast_impl(each, tl.float32) for each in (a, b))
        return dot(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    yield
