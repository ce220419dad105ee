"""Writes folders that AutoModel, AutoTokenizer and the class of their head open.

    plan(entries, config, heads, target) ──> ExportPlan   (plan.py) no value is read yet
    write(plan, folder)                  ──> config.json, model.safetensors or its shards,
                                             tokenizer files, README.md, how texts become
                                             vectors (text_pooling.py)

The token embeddings are written once: the decoder is tied to them.
"""

from __future__ import annotations

from pathlib import Path

from palm_ds.common.json_files import write_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.contents import SavesFiles
from palm_ds.weights.formats.huggingface.plan import ExportPlan, plan
from palm_ds.weights.formats.huggingface.read import CONFIG
from palm_ds.weights.formats.huggingface.sentence_transformers import write_modules
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.huggingface.text_pooling import write_pooling
from palm_ds.weights.formats.tensor_files import read_json, write_safetensors

__all__ = ["CARD", "ExportOptions", "ExportPlan", "plan", "write"]

CARD, _TOKENIZER = "README.md", "tokenizer_config.json"


def write(
    plan: ExportPlan, folder: Path, *, tokenizer: SavesFiles | None = None, card: str = ""
) -> None:
    """Fill an empty folder, one tensor at a time: the largest one decides the memory it takes.

    The caller publishes the folder. `card` is the README.md (model_card.py). Raises UserError if a
    weight is NaN or infinite, or too large for the dtype.
    """
    write_json(folder / CONFIG, plan.config_json)
    write_safetensors(folder, plan.groups, plan.dtype, plan.max_shard_bytes)
    length = plan.config.max_length
    if plan.pooling is not None:
        write_pooling(plan.pooling, folder, hidden_size=plan.config.hidden_size, max_length=length)
    write_modules(plan.extras.files, folder, max_length=length, dtype=plan.dtype)
    if tokenizer is not None:
        tokenizer.save(folder)
        _fit(folder / _TOKENIZER, plan.config)
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")


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
