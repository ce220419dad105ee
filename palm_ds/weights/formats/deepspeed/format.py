"""DeepSpeed's own shards as a checkpoint format (read-only)."""

from __future__ import annotations

from palm_ds.weights.formats.deepspeed.read import open_contents, recognises
from palm_ds.weights.formats.format import Format

FORMAT = Format(
    name="deepspeed",
    looks_for="DeepSpeed: latest, or *_model_states.pt",
    recognises=recognises,
    open=open_contents,
)
