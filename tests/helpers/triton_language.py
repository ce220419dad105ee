"""Takes all kernels through the first stage of Triton's compiler, for a card that is not here: it
refuses whatever is not in Triton's language, of which the interpreter accepts more.

    python -m tests.helpers.triton_language --> {"MODULE (KERNEL, ...)": lines of Triton's IR, ...}

To make machine code of it, as compile_attention and compile_fused_norm do, takes most of the time.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from tests.helpers import compile_attention, compile_fused_norm


class StoppedError(Exception):
    """With the text of the IR."""


def first_stage(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """Stands for `triton.compile`."""
    backend: Any = make_backend(target)
    parsed, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    made = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    raise StoppedError(str(made))


def lines_of(compiled: Any, call: tuple) -> int:
    try:
        compiled(*call)
    except StoppedError as stopped:
        return str(stopped).count("\n")
    raise AssertionError("was not compiled")


if __name__ == "__main__":
    triton.compile = first_stage
    made = {
        f"{module.__name__} {call}": lines_of(module.compiled, call)
        for module in (compile_attention, compile_fused_norm)
        for call in module.calls()
    }
    print(json.dumps(made))
