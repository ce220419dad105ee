"""Hugging Face folders as a checkpoint format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from palm_ds.weights.formats.contents import CheckpointContents, SavesFiles
from palm_ds.weights.formats.format import Export, Format
from palm_ds.weights.formats.huggingface.families import served_family
from palm_ds.weights.formats.huggingface.model_card import Provenance, model_card
from palm_ds.weights.formats.huggingface.plan import plan
from palm_ds.weights.formats.huggingface.read import open_contents, recognises
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.huggingface.sentence_transformers import MODULES
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.huggingface.write import CARD, write


def _export(contents: CheckpointContents, target: ExportOptions) -> Export:
    if not target.family and not contents.format.startswith("Hugging Face"):
        target = replace(target, family=served_family(contents.config))
    if MODULES in contents.skipped:  # vectors without its unknown module would be others
        target = replace(target, pooling=None)
    planned = plan(contents.entries, contents.config, contents.heads, target, contents.extras)

    def fill(folder: Path, tokenizer: SavesFiles | None) -> None:
        write(planned, folder, tokenizer=tokenizer)

    def write_card(folder: Path, made: Provenance) -> None:
        (folder / CARD).write_text(model_card(planned, made), encoding="utf-8")

    return Export(write=fill, plan=planned, write_card=write_card)


FORMAT = Format(
    name="huggingface",
    looks_for="Hugging Face: config.json with model.safetensors or pytorch_model.bin",
    recognises=recognises,
    open=open_contents,
    export=_export,
    run=in_transformers,
)
