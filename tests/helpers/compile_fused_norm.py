"""Compiles the kernels of `fused_norm` for a card that is not here; prints the sizes of their code.

    python -m tests.helpers.compile_fused_norm --> {"forward_kernel ...": bytes, ...}

Triton compiles to machine code without a GPU, but not in a process that interprets.
"""

from __future__ import annotations

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from palm_ds.model.ops import fused_norm, fused_norm_triton_kernels
from palm_ds.model.ops.dropout import DropoutKeys

KINDS = {name: "*fp32" for name in ("mean", "rstd", "d_weight", "d_bias")}
KINDS |= {"hashes": "*i32", "columns": "*i32", "eps": "fp32", "rows": "i32"}
HALF = ("x", "y", "weight", "bias", "out", "total", "grad", "d_x", "d_y")


def compiled(name: str, after: bool, rate: float) -> int:
    kernel = getattr(fused_norm_triton_kernels, name)
    empty = torch.empty(0)
    drop = fused_norm.Drop(rate, DropoutKeys(empty, empty)) if rate else None
    given = fused_norm._options(768, drop, after)
    kinds = {**{each: "*bf16" for each in HALF}, **KINDS}
    absent = (("y", "d_y") if after else ()) + (() if rate else ("hashes", "columns"))
    signature = {
        each: "constexpr" if each in absent else kinds.get(each, "constexpr")
        for each in kernel.arg_names
    }
    constants = {each: given.get(each) for each in signature if signature[each] == "constexpr"}
    options = {"num_warps": given["num_warps"]}
    source = ASTSource(kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return len(made.asm["cubin"])


def calls() -> list[tuple[str, bool, float]]:
    """The arguments of `compiled` for each kernel."""
    names, cases = ("forward_kernel", "backward_kernel"), ((False, 0.1), (True, 0.1), (False, 0.0))
    return [(name, *case) for name in names for case in cases]


if __name__ == "__main__":
    print(json.dumps({" ".join(map(str, call)): compiled(*call) for call in calls()}))
