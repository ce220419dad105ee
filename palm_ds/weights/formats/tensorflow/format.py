"""Google's TensorFlow BERT as a checkpoint format (read-only)."""

from __future__ import annotations

from palm_ds.weights.formats.format import Format
from palm_ds.weights.formats.tensorflow.read import open_contents, recognises

FORMAT = Format(
    name="tensorflow",
    looks_for="TensorFlow: *.ckpt.index with *.ckpt.data-*",
    recognises=recognises,
    open=open_contents,
)
