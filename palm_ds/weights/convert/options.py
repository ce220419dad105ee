"""Options of conversions, as `palm-ds convert` and Python have them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TEXTS = (
    "The river had risen in the night, and by morning the lower road was under water.",
    "Who wrote it? Nobody knows; the manuscript was found in 1897, in a box of old letters.",
    "In mathematics, a group is a set with an operation that is associative.",
    "他们在北京大学学习计算机科学。",
    "昨天下了一场大雨，今天早上天气很好。",
    "A short one.",
)
"""The texts that outputs are compared on by default."""


@dataclass(frozen=True, kw_only=True)
class CheckedConversion:
    """Options of every conversion."""

    task: str = ""
    """Task, or row of the task embedding, with which texts are read; by default the checkpoint's
    own. In ONNX, that of each head."""
    texts: Sequence[str] = TEXTS
    """Texts to compare the outputs on."""
    revision: str = ""
    """Branch, tag or commit, if the source is a name on the hub."""
    strict: bool = False
    """Refuse to skip a tensor, other than optimizer state."""
    verify: bool = True
    """Compare the outputs of both sides. Without it, the result is unverified."""


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(CheckedConversion):
    """Options of a conversion to weights."""

    family: str = ""
    """A model type: bert, roberta, ernie, modernbert, ... (docs/encoders.md). By default that of a
    Hugging Face source, or else bert or roberta, which more programs open than ernie."""
    head: str = ""
    """The classification head to write, as the only head."""
    head_class: str = ""
    """Class of transformers for that head, such as ForTokenClassification; Model: the encoder
    alone."""
    words: str = ""
    """Masked-LM head to write; by default the first."""
    dtype: str = "float32"
    """float32, float16 or bfloat16. Also spelled fp32, fp16 and bf16."""
    shard_size: str = "5GB"
    """Maximum size of a weights file. Larger models are sharded."""


@dataclass(frozen=True, kw_only=True)
class OnnxOptions(CheckedConversion):
    """Options of a conversion to ONNX."""

    heads: tuple[str, ...] = ()
    """The heads to include; empty: all, masked-LM heads only if there is no other."""
    precisions: tuple[str, ...] = ()
    """Files to write besides the one in fp32: fp16, int8."""
    opset: int = 18  # what ONNX Runtime 1.14 (2023) and later run
    """Version of ONNX's operators."""
