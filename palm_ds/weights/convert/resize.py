"""Surgery on a checkpoint of any format: words and positions more or fewer.

    source ──open_checkpoint──> Contents ──surgery──> Contents ──> target

A Hugging Face folder becomes one, everything else a weights/ folder. Only the tables that change
are held; all else is copied tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.model.config import EncoderConfig
from palm_ds.text.add_tokens import ExtendedTokenizer, add_tokens, initializing_ids, read_token_file
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.convert import embeddings as surgery
from palm_ds.weights.convert.embeddings import Changed
from palm_ds.weights.formats import native as own
from palm_ds.weights.formats.contents import Contents
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface import write as huggingface_writer
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.tensor_files import held


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What is to be done."""

    tokens: Path | None = None
    """A file of new tokens, one a line (palm_ds.text.add_tokens)."""
    reuse_unused: bool = False
    """New tokens take the places of [unused1], [unused2], ... first."""
    multiple: int | None = None
    """Grow or trim the word table to a multiple of this."""
    positions: int | None = None
    """Tokens that the longest text may have."""
    how: str = "tile"
    """Where new positions come from: tile or interpolate."""
    tokenizer: Path | None = None
    """The tokenizer, where the checkpoint has none with it."""
    seed: int = 0


def edit(source: Path, target: Path, wanted: Edit) -> list[str]:
    """Write `target` as asked; returns what was done, a line each. Raises UserError, and then
    nothing is written."""
    source, target = Path(source), Path(target)
    if wanted.tokens is None and wanted.multiple is None and wanted.positions is None:
        raise UserError("nothing to do: give tokens to add, a multiple, or positions")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: is there already; name a folder that is not")
    contents = open_checkpoint(source)
    path = wanted.tokenizer or contents.tokenizer
    tokenizer = load_tokenizer(path) if path else None
    names = surgery.concerned(contents.entries)
    state = {name: contents.entries[name].read() for name in names}
    try:
        changed, tokenizer, said = _operate(state, contents.config, tokenizer, wanted)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    entries = dict(contents.entries) | {name: held(name, x) for name, x in changed.state.items()}
    new = replace(contents, entries=entries, config=changed.config, tokenizer=None)
    said += [f"left behind: {name}: {why}" for name, why in contents.left.items()]
    write = _writer(new, tokenizer, said, as_hf=huggingface.recognises(source))
    try:
        write_folder_atomically(target, write)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
    return [*said, f"written to {target}"]


def _operate(
    state: dict[str, torch.Tensor],
    config: EncoderConfig,
    tokenizer: Tokenizer | None,
    wanted: Edit,
) -> tuple[Changed, Tokenizer | None, list[str]]:
    """The tables and the tokenizer after all that is wanted."""
    changed, said = Changed(state=state, config=config, said=""), []
    used = tokenizer.size if tokenizer else state[surgery.WORDS].shape[0]
    if wanted.tokens is not None:
        if tokenizer is None:
            raise UserError("has no tokenizer with it to add tokens to; name one")
        tokens = read_token_file(wanted.tokens)
        added = add_tokens(tokenizer, tokens, reuse_unused=wanted.reuse_unused)
        rows = {
            i: initializing_ids(tokenizer, token, tokens[token]) for token, i in added.ids.items()
        }
        changed = surgery.place_words(state, config, rows, used=used, seed=wanted.seed)
        said += [_about(added, tokens), changed.said]
        tokenizer, used = added.tokenizer, added.tokenizer.size
    if wanted.multiple is not None:
        changed = surgery.fit_words(
            changed.state,
            changed.config,
            used=used,
            multiple=wanted.multiple,
            seed=wanted.seed + 2,  # not the rows that place_words drew
        )
        said.append(changed.said)
    if wanted.positions is not None:
        changed = surgery.resize_positions(
            changed.state, changed.config, wanted.positions, how=wanted.how
        )
        said.append(changed.said)
    return changed, tokenizer, said


def _about(added: ExtendedTokenizer, tokens: dict[str, str]) -> str:
    shown = ", ".join(f"{token} {i}" for token, i in list(added.ids.items())[:5])
    more = f", and {len(added.ids) - 5} more" if len(added.ids) > 5 else ""
    known = (
        f"; {len(added.already_known)} of {len(tokens)} were there already"
        if added.already_known
        else ""
    )
    return f"tokens: {shown or 'none is new'}{more}{known}"


def _writer(
    contents: Contents, tokenizer: Tokenizer | None, said: list[str], *, as_hf: bool
) -> Callable[[Path], None]:
    def hugging_face(part: Path) -> None:
        target = huggingface_writer.Target(dtype="")
        plan = huggingface_writer.plan(contents.entries, contents.config, contents.heads, target)
        huggingface_writer.write(plan, part, tokenizer=tokenizer)
        said.extend(f"left behind: {name}: {why}" for name, why in plan.left.items())

    def weights(part: Path) -> None:
        own.write(contents, part, edited=list(said))
        if tokenizer is not None:
            tokenizer.save(part / "tokenizer")

    return hugging_face if as_hf else weights
