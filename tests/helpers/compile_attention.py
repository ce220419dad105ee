"""Compiles the attention kernels for cards that are not here, and prints what they need there.

    python -m tests.helpers.compile_attention --> [{"kernel": ..., "shared": bytes}, ...]

Triton compiles to machine code without a GPU, but not in a process that interprets.
"""

from __future__ import annotations

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from palm_ds.model.attention import triton as attention_triton
from palm_ds.model.attention import triton_kernels as attention_triton_kernels

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS = {"bounds": "*i32", "visibility": "*i32", "hashes": "*i64"}
POINTERS |= {"row_hashes": "*i32", "column_hashes": "*i32"}
POINTERS |= {"sums": "*fp32", "products": "*fp32"}
NUMBERS = {"tokens": "i32", "scale": "fp32"}
CASES = ((90, torch.bfloat16, 64, 0.1, 64),)
"""(compute capability x 10, dtype, head size, dropout, window)"""


def compiled(
    name: str, capability: int, dtype: torch.dtype, size: int, dropout: float, window: int | None
) -> dict[str, object]:
    kernel = getattr(attention_triton_kernels, name)
    parts = torch.empty(512, 3, 12, size, dtype=dtype, device="meta")
    blocks = attention_triton._blocks(parts, dropout, forward=name == "forward_kernel").options()
    given = {**attention_triton._arguments(parts, dropout, window), **blocks}
    kinds = {name: TYPES[dtype] for name in ("qkv", "out", "grad", "d_qkv")} | POINTERS | NUMBERS
    signature = {each: kinds.get(each, "constexpr") for each in kernel.arg_names}
    constants = {each: given[each] for each, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel, signature, constants)
    options = {each: blocks[each] for each in ("num_warps", "num_stages")}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"kernel": name, "shared": made.metadata.shared, "code": len(made.asm["cubin"])}


def calls() -> list[tuple]:
    """The arguments of `compiled` for each kernel."""
    names = ("forward_kernel", "backward_query_kernel", "backward_key_kernel")
    return [(name, *case) for case in CASES for name in names]


if __name__ == "__main__":
    print(json.dumps([compiled(*call) for call in calls()]))
