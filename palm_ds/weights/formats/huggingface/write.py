"""Writes folders that AutoModel, AutoTokenizer and the class of their head open.

    plan(entries, config, heads, target) ──> ExportPlan   (plan.py) no value is read yet
    write(plan, folder)                  ──> config.json, model.safetensors or its shards,
                                             tokenizer files, README.md, how texts become
                                             vectors (text_pooling.py)

The token embeddings are written once: the decoder is tied to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.pooling import SPLADE
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.format import Export, Format
from palm_ds.weights.formats.huggingface.cross_encoder import write_head
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_of, served_family
from palm_ds.weights.formats.huggingface.model_card import Provenance, model_card
from palm_ds.weights.formats.huggingface.plan import ExportPlan, plan
from palm_ds.weights.formats.huggingface.read import CONFIG, open_contents, recognizes
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.huggingface.sentence_transformers import (
    MODULES,
    modules_of,
    write_modules,
)
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.huggingface.text_pooling import write_pooling
from palm_ds.weights.formats.tensor_files import read_json, write_safetensors

__all__ = ["CARD", "ExportOptions", "ExportPlan", "plan", "plan_of", "write"]

CARD, _TOKENIZER = "README.md", "tokenizer_config.json"


def write(
    plan: ExportPlan, folder: Path, *, tokenizer: Tokenizer | None = None, card: str = ""
) -> None:
    """Fill an empty folder, one tensor at a time: the largest one decides the memory it takes.

    The caller publishes the folder. `card` is the README.md (model_card.py). Raises UserError if a
    weight is NaN or infinite, or too large for the dtype.
    """
    write_json(folder / CONFIG, _with_token_ids(plan.config_json, tokenizer))
    write_safetensors(folder, plan.groups, plan.dtype, plan.max_shard_bytes)
    length, width = plan.config.max_length, plan.config.hidden_size
    if plan.pooling is not None:
        write_pooling(plan.pooling, folder, hidden_size=width, max_length=length)
    if plan.head:
        write_head(plan.head, folder, hidden_size=width, max_length=length, dtype=plan.dtype)
    write_modules(plan.extras.files, folder, max_length=length, dtype=plan.dtype)
    if tokenizer is not None:
        tokenizer.save(folder)
        _fit(folder / _TOKENIZER, plan.config)
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")


def _with_token_ids(about: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json with the ids that transformers, text-embeddings-inference and others would take
    from the published tokenizer, or could not do without."""
    if tokenizer is None:
        return dict(about)
    ids = tokenizer.vocabulary
    known = {f"{role}_token_id": ids.cls for role in ("bos", "cls")}
    known |= {f"{role}_token_id": ids.sep for role in ("eos", "sep")}
    unset = architecture_of(about["model_type"]).published_ids
    return {
        key: known[key] if key in unset and value is None else value for key, value in about.items()
    }


def _fit(path: Path, config: EncoderConfig) -> None:
    """Set what the tokenizer must know of the encoder: the maximum length, and not to return token
    types if there is only one."""
    if not path.is_file():
        return
    about = {"model_max_length": config.max_length} | read_json(path)
    about["model_max_length"] = min(about["model_max_length"], config.max_length)
    if config.token_types == 1:
        about["model_input_names"] = ["input_ids", "attention_mask"]
    write_json(path, about)


def plan_of(contents: CheckpointContents, target: ExportOptions) -> ExportPlan:
    """Plan a folder of an opened checkpoint. Raises UserError."""
    if not target.family and not contents.format.startswith("Hugging Face"):
        target = replace(target, family=served_family(contents.config))
    target = replace(target, words=target.words or _words_of_vectors(contents))
    if contents.pooling is not None:
        target = replace(target, pooling=contents.pooling)
    if MODULES in contents.skipped:  # vectors without its unknown module would be others
        target = replace(target, pooling=None)
    if target.family and FAMILIES[target.family].paddle_only:
        raise UserError(
            f"family: transformers has no {target.family}, or no longer; --to paddle writes it"
        )
    return plan(contents.entries, contents.config, contents.heads, target, contents.extras)


def _export(contents: CheckpointContents, target: ExportOptions) -> Export:
    planned = plan_of(contents, target)

    def fill(folder: Path, tokenizer: Tokenizer | None) -> None:
        write(planned, folder, tokenizer=tokenizer)

    def write_card(folder: Path, made: Provenance) -> None:
        (folder / CARD).write_text(model_card(planned, made), encoding="utf-8")

    return Export(write=fill, plan=planned, write_card=write_card)


def _words_of_vectors(contents: CheckpointContents) -> str:
    """The masked-LM head that sparse vectors of texts are read from, if its task is known."""
    head = contents.head_of.get(contents.export_task, "")
    sparse = head in contents.masked_lm_heads and modules_of(contents).pooling == SPLADE
    return head if sparse else ""


FORMAT = Format(
    name="huggingface",
    looks_for="Hugging Face: config.json with model.safetensors or pytorch_model.bin",
    recognizes=recognizes,
    open=open_contents,
    export=_export,
    run=in_transformers,
)
