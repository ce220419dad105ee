"""Resizes the token and position embeddings of a checkpoint of any format.

    source ──open_model──> CheckpointContents ──resize──> CheckpointContents ──> target

A Hugging Face folder is written as one, every other format as a weights/ folder. Only the resized
tables are in memory; all other tensors are copied one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from palm_ds.common.atomic import check_new_folder, write_new_folder
from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.text.add_tokens import ExtendedTokenizer, add_tokens, initializing_ids, read_token_file
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.convert import embeddings
from palm_ds.weights.convert.embeddings import ResizedState
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents, read_tokenizer
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface import write as huggingface_writer
from palm_ds.weights.formats.tensor_files import in_memory_entry
from palm_ds.weights.model_folder import open_model


@dataclass(frozen=True, kw_only=True)
class ResizeOptions(Settings):
    """Settings for resizing a checkpoint."""

    tokens: Path | None = None
    """File of new tokens, one per line (palm_ds.text.add_tokens)."""
    reuse_unused: bool = False
    """Put new tokens in the rows of [unused1], [unused2], ... first."""
    multiple: int | None = None
    """Grow or trim the token embeddings to a multiple of this."""
    positions: int | None = None
    """New maximum length in tokens."""
    how: str = "tile"
    """How to fill new positions: tile or interpolate."""
    tokenizer: Path | None = None
    """The tokenizer, if the checkpoint does not contain it."""
    seed: Annotated[int, Field(ge=0, lt=1 << 62)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse_unused and self.tokens is None:
            raise UserError("reuse_unused: only with new tokens; give --add_tokens")
        if self.how != type(self).how and self.positions is None:
            raise UserError("how: only with new positions; give --positions")


def resize_checkpoint(source: Path, target: Path, wanted: ResizeOptions) -> list[str]:
    """Resize `source` into the new folder `target`; returns one line per change. If it raises
    UserError, nothing is written."""
    source, target = Path(source), Path(target)
    if wanted.tokens is None and wanted.multiple is None and wanted.positions is None:
        raise UserError("nothing to do: give --add_tokens, --multiple or --positions")
    check_new_folder(target)
    contents = open_model(source)
    path = wanted.tokenizer or contents.tokenizer
    tokenizer = load_tokenizer(path) if path else None
    names = embeddings.resizable_names(contents.entries)
    state = {name: contents.entries[name].read() for name in names}
    tokens = read_token_file(wanted.tokens) if wanted.tokens is not None else {}
    try:
        changed, tokenizer, said = _operate(state, contents.config, tokenizer, tokens, wanted)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    entries = dict(contents.entries) | {
        name: in_memory_entry(name, value) for name, value in changed.state.items()
    }
    new = replace(
        contents,
        entries=entries,
        config=changed.config,
        recipe=_resized_recipe(contents, changed.config, said),
        tokenizer=None,
        text_tokenizer=None,
    )
    said += [f"skipped: {name}: {why}" for name, why in contents.skipped.items()]
    texts = None if wanted.tokenizer else read_tokenizer(contents)
    texts = _resized_tokenizer(texts, changed.config, tokens, wanted) if texts else None
    write = _writer(new, tokenizer, texts, said, as_hf=huggingface.recognizes(contents.path))
    write_new_folder(target, write)
    return [*said, f"written to {target}"]


def _operate(
    state: dict[str, torch.Tensor],
    config: EncoderConfig,
    tokenizer: Tokenizer | None,
    tokens: Mapping[str, str],
    wanted: ResizeOptions,
) -> tuple[ResizedState, Tokenizer | None, list[str]]:
    """The tables and the tokenizer after all changes, with one line per change."""
    changed, said = ResizedState(state=state, config=config, summary=""), []
    used = tokenizer.size if tokenizer else state[embeddings.WORDS].shape[0]
    if tokens:
        if tokenizer is None:
            raise UserError("has no tokenizer to add tokens to; give --tokenizer")
        added = add_tokens(tokenizer, tokens, reuse_unused=wanted.reuse_unused)
        rows = {
            i: initializing_ids(tokenizer, token, tokens[token]) for token, i in added.ids.items()
        }
        changed = embeddings.add_token_rows(state, config, rows, used=used, seed=wanted.seed)
        said += [_about(added, tokens), changed.summary]
        tokenizer, used = added.tokenizer, added.tokenizer.size
    if wanted.multiple is not None:
        changed = embeddings.pad_vocab(
            changed.state,
            changed.config,
            used=used,
            multiple=wanted.multiple,
            seed=wanted.seed + 2,  # not the rows that add_token_rows drew
        )
        said.append(changed.summary)
    if wanted.positions is not None:
        changed = embeddings.resize_positions(
            changed.state, changed.config, wanted.positions, how=wanted.how
        )
        tokenizer = tokenizer and tokenizer.of_length(changed.config.max_length)
        said.append(changed.summary)
    return changed, tokenizer, said


def _resized_tokenizer(
    tokenizer: Tokenizer, config: EncoderConfig, tokens: Mapping[str, str], wanted: ResizeOptions
) -> Tokenizer:
    """The tokenizer for texts that are not prepared yet, changed as the encoder's own is."""
    if tokens:
        tokenizer = add_tokens(tokenizer, tokens, reuse_unused=wanted.reuse_unused).tokenizer
    return tokenizer.of_length(config.max_length) if wanted.positions is not None else tokenizer


def _resized_recipe(
    contents: CheckpointContents, config: EncoderConfig, said: list[str]
) -> dict[str, Any]:
    """The recipe, for the tasks in it, with the new encoder; empty, with a line, if that reads
    shorter texts."""
    if not contents.recipe:
        return {}
    if config.max_length < contents.config.max_length:
        said.append("tasks: left out, since their texts may be longer than the encoder reads now")
        return {}
    return {**contents.recipe, "backbone": asdict(config)}


def _about(added: ExtendedTokenizer, tokens: Mapping[str, str]) -> str:
    shown = ", ".join(f"{token} {i}" for token, i in list(added.ids.items())[:5])
    more = f", and {len(added.ids) - 5} more" if len(added.ids) > 5 else ""
    known = (
        f"; {len(added.already_known)} of {len(tokens)} already known"
        if added.already_known
        else ""
    )
    return f"tokens: {shown or 'none new'}{more}{known}"


def _writer(
    contents: CheckpointContents,
    tokenizer: Tokenizer | None,
    texts: Tokenizer | None,
    said: list[str],
    *,
    as_hf: bool,
) -> Callable[[Path], None]:
    """A function that fills a folder. `texts`: the tokenizer for texts that are not prepared."""

    def weights(part: Path) -> None:
        native.write(contents, part, tokenizers=(tokenizer, texts), edited=list(said))

    return hf_writer(contents, tokenizer, said) if as_hf else weights


def hf_writer(
    contents: CheckpointContents, tokenizer: Tokenizer | None, said: list[str], card: str = ""
) -> Callable[[Path], None]:
    """A function that fills a folder with these contents as Hugging Face's, in their own dtype; it
    adds a line for each tensor that is skipped to `said`. `card`: README.md."""

    def write(part: Path) -> None:
        plan = huggingface_writer.plan_of(contents, huggingface_writer.ExportOptions(dtype=""))
        huggingface_writer.write(plan, part, tokenizer=tokenizer, card=card)
        said.extend(f"skipped: {name}: {why}" for name, why in plan.skipped.items())

    return write
