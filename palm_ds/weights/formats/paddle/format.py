"""Paddle checkpoints as a checkpoint format: every era is read, PaddleNLP's is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.formats.contents import USUAL, CheckpointContents, SavesFiles
from palm_ds.weights.formats.format import Export, Format
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.paddle.read import open_contents, recognises
from palm_ds.weights.formats.paddle.write import plan, why_no_tokenizer, write


def _export(contents: CheckpointContents, target: ExportOptions) -> Export:
    planned = plan(contents.entries, contents.config, contents.heads, target)
    stated = modules_of(contents)
    usual = stated.is_usual(contents.config.max_length)
    why = f"{USUAL}; " if usual else ""
    behind = dict.fromkeys(contents.extras.files, f"{why}PaddleNLP has no sentence-transformers")
    tokenizer = contents.text_tokenizer or contents.tokenizer
    if tokenizer and (why := why_no_tokenizer(load_tokenizer(tokenizer))):
        behind["tokenizer"] = why
    planned = replace(planned, skipped={**planned.skipped, **behind})

    def fill(folder: Path, tokenizer: SavesFiles | None) -> None:
        write(planned, folder, tokenizer=tokenizer)

    return Export(write=fill, plan=planned)


FORMAT = Format(
    name="paddle",
    looks_for="Paddle: *.pdparams, params/, or a combined file, with ernie_config.json or similar",
    recognises=recognises,
    open=open_contents,
    export=_export,
)
