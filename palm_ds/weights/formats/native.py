"""The palm_ds format: weights folders, and the checkpoints of a run.

    weights/                      weights.json (with hashes) + weights.safetensors (+ tokenizer/)
    RUN/checkpoints/step_N        shards by name, of any number of processes and any ZeRO stage

A checkpoint is read parameter by parameter, so the largest one decides the memory it takes;
optimizer moments are skipped. Files are hashed before anything is read from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from palm_ds.common.config import parse, read_yaml
from palm_ds.common.errors import UserError
from palm_ds.common.version import __version__
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.distillation import PREFIX as DISTILLATION
from palm_ds.model.encoder.encoder import with_rope_bases
from palm_ds.model.encoder.shared_embeddings import parts_of_tables
from palm_ds.model.heads.ngrams import without_ngrams
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.lora import merged_parts, merged_values
from palm_ds.model.pooling import TextPooling
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.shard_files import AVERAGE, WEIGHT, ShardReader
from palm_ds.text.exported_tokenizer import TextPreparation
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.weights.formats import weights_info
from palm_ds.weights.formats.contents import (
    OPTIMIZER,
    CheckpointContents,
    Extras,
    HeadInfo,
    TensorEntry,
    read_tokenizer,
    with_eps,
)
from palm_ds.weights.formats.expected_shapes import TRANSITIONS, checked
from palm_ds.weights.formats.format import Export, Format
from palm_ds.weights.formats.huggingface.sentence_transformers import FOLDER as MODULES_FOLDER
from palm_ds.weights.formats.huggingface.sentence_transformers import write_modules
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.huggingface.text_pooling import write_pooling
from palm_ds.weights.formats.tensor_files import (
    TORCH_DTYPES,
    TensorGroup,
    open_safetensors,
    write_file,
)

_T = TypeVar("_T")
WEIGHTS = "weights.safetensors"
TEXT_TOKENIZER = "text_tokenizer"
"""Simplifies and lower-cases texts as training did before its own tokenizer."""
ADAPTER = "lora.safetensors"
"""Of a run's best/: LoRA's matrices before they were merged."""
_WEIGHTS_OF_RUN = ("weights", "best")
_MASKED = {"dense.weight", "norm.weight", "bias"}
_MAY_BE_MASKED = {"dense.bias", "norm.bias", "decoder"}
"""Parts of a masked-LM head, and those that some have."""
_BARE_MASKED = ({"decoder"}, {"decoder", "bias"})
"""Parts of one that is its output alone."""
_CLASSES = ("out.weight", "out.bias")
_HIDDEN = ("hidden.weight", "hidden.bias")
_DETECTION = {"dense.weight", "dense.bias", *_CLASSES}
"""Parts of a head that detects replaced tokens, without its norm and its generator."""
_GENERATOR = "generator."


# ---- reading ----


def recognizes(path: Path) -> bool:
    """Whether it is a weights/ folder or a checkpoint."""
    return is_checkpoint(path) or (path / weights_info.INFO).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether it is one checkpoint of a run."""
    return path.name.startswith("step_") and (path / checkpoint.MANIFEST).is_file()


def open_contents(
    path: Path, *, tokenizer: Path | None = None, eps: float | None = None
) -> CheckpointContents:
    """Open a weights folder, or a checkpoint of a run after verifying it.

    `tokenizer`: the tokenizer it was trained with, as a file or folder; a checkpoint has only its
    fingerprint, which must match. `eps` overrides the LayerNorm eps of the config. Raises UserError
    if anything is missing or damaged.
    """
    path = Path(path)
    if is_checkpoint(path):
        return open_verified(checkpoint.open_published(path), tokenizer=tokenizer, eps=eps)
    contents, own = _from_weights(path), Path(tokenizer) if tokenizer else None
    return with_eps(replace(contents, tokenizer=own, text_tokenizer=None) if own else contents, eps)


def open_verified(
    verified: checkpoint.VerifiedCheckpoint,
    *,
    tokenizer: Path | None = None,
    eps: float | None = None,
) -> CheckpointContents:
    """Open a checkpoint that was verified before, like `open_contents`."""
    return with_eps(_from_checkpoint(verified, tokenizer), eps)


def encoder_in(verified: checkpoint.VerifiedCheckpoint) -> EncoderConfig:
    """The config of a checkpoint's encoder. Raises UserError."""
    signature = signature_in(verified)
    where = f"{verified.path}: signature.backbone"
    config = EncoderConfig.from_dict(signature["backbone"], where)
    return with_rope_bases(config, signature.get("rope_bases") or (None, None))


def _from_weights(folder: Path) -> CheckpointContents:
    info = weights_info.read_info(folder / weights_info.INFO)
    if problems := weights_info.damaged_files(folder, info, but=WEIGHTS):
        raise UserError(problems[0])
    entries = _tensors(folder / WEIGHTS, info)
    shapes = {name: entry.shape for name, entry in entries.items()}
    own, preparing = folder / "tokenizer", folder / TEXT_TOKENIZER
    contents = CheckpointContents(
        path=folder,
        format="palm_ds weights",
        config=_filled(info.backbone, shapes.get("backbone.word.weight"), folder),
        entries=entries,
        heads=with_task_ids(
            heads_of(shapes, info.token_heads, info.heads),
            info.head_of,
            info.task_ids if info.backbone.task_types else {},
        ),
        task_ids=info.task_ids,
        head_of=info.head_of,
        export_task=info.export_task,
        recipe=info.recipe,
        hashes={name: str(entry["sha256"]) for name, entry in info.files.items()},
        tokenizer=own if own.is_dir() else None,
        text_tokenizer=preparing if preparing.is_dir() else None,
        preparation=TextPreparation(),  # the special tokens that training puts around texts
        extras=Extras(config=info.extra_config, files=_files_in(folder / MODULES_FOLDER)),
    )
    return checked(contents)


def _tensors(file: Path, info: weights_info.WeightsInfo) -> dict[str, TensorEntry]:
    """The tensors of a folder. The file is hashed before the first value is read."""

    @cache
    def check() -> None:
        stated = info.files.get(file.name)
        if stated and (problem := checkpoint.check_file(file, stated)):
            raise UserError(f"{file}: {problem}")

    def read(entry: TensorEntry) -> torch.Tensor:
        check()
        return entry.read()

    tensors = open_safetensors(file)
    return {
        name: replace(tensors[name], read=partial(read, tensors[name])) for name in ordered(tensors)
    }


def _files_in(folder: Path) -> dict[str, Path]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def _filled(config: EncoderConfig, words: tuple[int, ...] | None, where: Path) -> EncoderConfig:
    """The config with `vocab_size` taken from the token embeddings if it has none."""
    if config.vocab_size is not None:
        return config
    if not words:
        raise UserError(f"{where}: incomplete, it has no backbone.word.weight")
    return replace(config, vocab_size=words[0])


def _from_checkpoint(
    verified: checkpoint.VerifiedCheckpoint, tokenizer: Path | None
) -> CheckpointContents:
    signature = signature_in(verified)
    stored = _stored(verified)
    config = encoder_in(verified)
    names = stored.names()
    recorded = signature["shapes"]
    shapes = {x: tuple(recorded[x]) for x in ordered(recorded) if not x.startswith(DISTILLATION)}
    for name, shape in shapes.items():
        if name not in stored or not stored.covers(name) or stored.size(name) != prod(shape):
            raise UserError(f"{verified.path}: {name}: some of its values are missing")
    maps = {name: "a map to a teacher's width" for name in names if name.startswith(DISTILLATION)}
    kind, notes = _kind_taken(stored, verified)
    every = _entries(stored, kind, shapes, signature.get("lora_scale", 0.0))
    entries = without_ngrams(every)
    maps |= {name: "of pretraining with n-grams alone" for name in every if name not in entries}
    shapes = {name: entry.shape for name, entry in entries.items()}
    contents = CheckpointContents(
        path=verified.path,
        format=f"palm_ds checkpoint of step {verified.step:,}",
        config=_filled(config, shapes.get("backbone.word.weight"), verified.path),
        entries=entries,
        heads=heads_of(
            shapes,
            tuple(signature.get("token_heads", ())),
            weights_info.read_outputs(signature.get("heads"), f"{verified.path}: signature.heads"),
        ),
        task_ids=signature["task_ids"],
        head_of=signature.get("head_of", {}),
        export_task=signature.get("export_task", ""),
        hashes=verified.hashes,
        recipe=_recipe_beside(verified.path),
        pooling=_stated(TextPooling, signature, "pooling", verified.path),
        preparation=_stated(TextPreparation, signature, "preparation", verified.path),
        skipped={f"{kind}/{n}": OPTIMIZER for n in names for kind in sorted(stored.moments(n))}
        | maps,
        tokenizer=_tokenizer_of(verified.path, tokenizer, signature.get("tokenizer")),
        notes=notes,
    )
    return checked(contents)


def _kind_taken(
    stored: ShardReader, verified: checkpoint.VerifiedCheckpoint
) -> tuple[str, tuple[str, ...]]:
    """The kind of values that a run would end with here, and a note if there is a choice."""
    if not stored.has_averages:
        return WEIGHT, ()
    if problem := (verified.state.get("recovery") or {}).get("averages"):
        return WEIGHT, (f"optimizer.ema: not the averaged weights, which are not good: {problem}",)
    return AVERAGE, ("optimizer.ema: the averaged weights, with which a run ends",)


def signature_in(verified: checkpoint.VerifiedCheckpoint) -> dict[str, Any]:
    """The model that a checkpoint belongs to (`train.extend.ModelSignature`). Raises UserError."""
    signature = verified.state.get("signature")
    if not isinstance(signature, dict) or not all(
        isinstance(signature.get(key), dict) for key in ("backbone", "shapes")
    ):
        raise UserError(f"{verified.path}: {checkpoint.MANIFEST} does not describe the encoder")
    return {"task_ids": {}, **signature}


def _stated(kind: type[_T], signature: Mapping[str, Any], key: str, path: Path) -> _T | None:
    stated = signature.get(key)
    return parse(kind, stated, f"{path}: signature.{key}") if stated else None


def _recipe_beside(path: Path) -> dict[str, Any]:
    with suppress(UserError):  # whoever needs the recipe reads it again, and says why it cannot
        return recipe_of_run(path)
    return {}


def recipe_of_run(path: Path) -> dict[str, Any]:
    """The resolved recipe of the run that a checkpoint is in. Raises UserError."""
    file = path.absolute().parent.parent / "recipe.yaml"
    if not file.is_file():
        raise UserError(f"{path}: has no recipe.yaml next to its checkpoints; give the run folder")
    recipe = read_yaml(file)
    recipe.pop("corpora", None)  # what a run folder adds
    return recipe


def _stored(verified: checkpoint.VerifiedCheckpoint) -> ShardReader:
    try:
        return ShardReader(verified.files)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{verified.path}: cannot be read: {error}") from None


def _entries(
    stored: ShardReader, kind: str, shapes: Mapping[str, tuple[int, ...]], lora_scale: float
) -> dict[str, TensorEntry]:
    """The parameters of the model; those that LoRA changes are merged as they are read."""

    def read(name: str) -> torch.Tensor:
        return stored.read(name, kind, 0, stored.size(name)).view(shapes[name])

    entries = {}
    for name, parts in merged_parts(shapes).items():
        rows = sum(shapes[part.base][0] for part in parts)
        entries[name] = TensorEntry(
            source_names=tuple(source for part in parts for source in part if source),
            shape=(rows, *shapes[parts[0].base][1:]),
            read=partial(merged_values, parts, lora_scale, read),
            transform="LoRA merged" if any(part.down for part in parts) else "",
        )
    for name, (base, delta) in parts_of_tables(entries).items():
        entries[name] = _summed(entries[base], entries.pop(delta))
    return {name: entries[name] for name in ordered(entries)}


def _summed(base: TensorEntry, delta: TensorEntry) -> TensorEntry:
    """An embedding of a discriminator, from that of its generator."""
    return TensorEntry(
        source_names=(*base.source_names, *delta.source_names),
        shape=delta.shape,
        read=lambda: base.read() + delta.read(),
        transform="added to the generator's",
    )


def _tokenizer_of(path: Path, given: Path | None, fingerprint: str | None) -> Path | None:
    """The given tokenizer, or one that its run names, if it has the checkpoint's fingerprint."""
    if given and fingerprint and load_tokenizer(given).fingerprint != fingerprint:
        raise UserError(f"{path}: was trained with a tokenizer other than {given}")
    if given:
        return Path(given)
    return next((x for x in _named_tokenizers(path) if _has_fingerprint(x, fingerprint)), None)


def _named_tokenizers(path: Path) -> Iterator[Path]:
    """Those of the weights of a checkpoint's run, of the sources of its recipe, of `init_from`."""
    run = path.parent.parent
    yield from (run / folder / "tokenizer" for folder in _WEIGHTS_OF_RUN)
    try:
        recipe = read_yaml(run / "recipe.yaml")
    except UserError:
        return
    sources, start = recipe.get("sources") or {}, recipe.get("init_from")
    yield from (Path(source["tokenizer"]) for source in sources.values() if source.get("tokenizer"))
    yield from (Path(name) / "tokenizer" for name in recipe.get("corpora") or ())
    if start:
        yield Path(start)
        yield from (Path(start) / x / "tokenizer" for x in ("", *_WEIGHTS_OF_RUN))


def _has_fingerprint(tokenizer: Path, fingerprint: str | None) -> bool:
    """Whether there is a tokenizer, and it is the one of this fingerprint, if that is known."""
    try:
        return tokenizer.exists() and fingerprint in (None, load_tokenizer(tokenizer).fingerprint)
    except UserError:
        return False


def heads_of(
    shapes: Mapping[str, tuple[int, ...]],
    token_heads: Iterable[str],
    outputs: Mapping[str, HeadOutputs],
) -> dict[str, HeadInfo]:
    """The heads that these parameters form, in their order."""
    parts: dict[str, set[str]] = {}
    for name in shapes:
        if name.startswith("heads."):
            _, head, part = name.split(".", 2)
            parts.setdefault(head, set()).add(part)
    heads: dict[str, HeadInfo] = {}
    for head, names in parts.items():
        if (names >= _MASKED and names <= _MASKED | _MAY_BE_MASKED) or names in _BARE_MASKED:
            meaning = outputs.get(head, HeadOutputs())
            heads[head] = HeadInfo(kind="masked_words", pooled=False, outputs=meaning)
        elif names in (set(_CLASSES), {*_CLASSES, TRANSITIONS}, {*_CLASSES, *_HIDDEN}):
            crf = TRANSITIONS in names
            heads[head] = HeadInfo(
                kind="classes",
                classes=shapes[f"heads.{head}.out.bias"][0],
                pooled=not crf and head not in token_heads,
                transitions=crf,
                hidden=shapes.get(f"heads.{head}.hidden.bias", (0,))[0],
                outputs=outputs.get(head, HeadOutputs()),
            )
        elif _is_detection(names):
            heads[head] = HeadInfo(kind="replaced_tokens", pooled=False)
    return heads


def _is_detection(parts: Collection[str]) -> bool:
    own = {part for part in parts if not part.startswith(_GENERATOR)}
    return own - {"norm.weight", "norm.bias"} == _DETECTION


def with_task_ids(
    heads: Mapping[str, HeadInfo], head_of: Mapping[str, str], task_ids: Mapping[str, int]
) -> dict[str, HeadInfo]:
    """The heads with the row of the task embedding that the texts of their task have. A head that
    several tasks use has its owner's."""
    rows = {head: task_ids[task] for task, head in head_of.items() if task in task_ids}
    rows |= {head: task_ids[head] for head in heads if head in task_ids}
    return {name: replace(head, task_id=rows.get(name)) for name, head in heads.items()}


_EMBEDDINGS = ("word", "position", "segment", "task", "norm")
"""Modules below the layers, where an encoder has them."""


def ordered(names: Iterable[str]) -> list[str]:
    """Names in the model's order, heads alphabetically, so that the written file does not depend on
    the order in the source."""

    def key(name: str) -> tuple[Any, ...]:
        first, _, rest = name.partition(".")
        part = rest.split(".")[0]
        if first != "backbone":
            return (3, 0, name)
        if part == "layers":
            number = rest.split(".")[1]
            return (1, int(number) if number.isdigit() else 0, name)
        return (0, _EMBEDDINGS.index(part), name) if part in _EMBEDDINGS else (2, 0, name)

    return sorted(names, key=key)


# ---- writing ----


def write(
    contents: CheckpointContents,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None] | None = None,
    **made_by: object,
) -> None:
    """Write a weights/ folder into an empty folder, one tensor at a time: the largest one decides
    the memory it takes. The caller publishes the folder. `tokenizers`: the encoder's own and the
    one for texts that are not prepared, if not those of the contents."""
    info = weights_info.WeightsInfo(
        backbone=contents.config,
        task_ids=dict(contents.task_ids),
        head_of=dict(contents.head_of) or {name: name for name in contents.heads},
        export_task=contents.export_task,
        token_heads=tuple(
            name
            for name, head in contents.heads.items()
            if head.kind == "classes" and not head.pooled
        ),
        heads={name: head.outputs for name, head in contents.heads.items()},
        extra_config=contents.extras.config,
        made_by=made_by,
        recipe=dict(contents.recipe),
    )
    groups = [
        TensorGroup(
            names=(name,), shape=entry.shape, make=partial(_one, entry), source_names=(name,)
        )
        for name, entry in contents.entries.items()
    ]
    write_file(folder / WEIGHTS, groups, dtype)
    length, modules = contents.config.max_length, folder / MODULES_FOLDER
    write_modules(contents.extras.files, modules, max_length=length, dtype=dtype)
    if contents.pooling is not None:
        width = contents.config.hidden_size
        write_pooling(contents.pooling, modules, hidden_size=width, max_length=length)
    own, texts = tokenizers or _tokenizers_of(contents)
    if own is not None:
        own.save(folder / "tokenizer")
    if own is not None and texts is not None and texts.fingerprint != own.fingerprint:
        texts.save(folder / TEXT_TOKENIZER)
    weights_info.write_info(folder, info)


def _tokenizers_of(contents: CheckpointContents) -> tuple[Tokenizer | None, Tokenizer | None]:
    own = load_tokenizer(contents.tokenizer) if contents.tokenizer else None
    return own, read_tokenizer(contents)


def _one(entry: TensorEntry) -> tuple[torch.Tensor]:
    return (entry.read(),)


def _export(contents: CheckpointContents, target: ExportOptions) -> Export:
    for name in ("family", "head", "head_class", "words"):
        if value := getattr(target, name):
            raise UserError(f"{name}: {value!r} does not apply: palm_ds keeps every tensor")
    dtype = TORCH_DTYPES[target.dtype or "float32"]
    made_by: dict[str, Any] = {"palm_ds": __version__, "converted_from": contents.format}
    made_by |= {"origin": contents.origin} if contents.origin else {}

    def fill(folder: Path, _tokenizer: Tokenizer | None) -> None:
        write(contents, folder, dtype=dtype, **made_by)

    return Export(write=fill, task_id=target.task_id)


FORMAT = Format(
    name="palm_ds",
    looks_for="palm_ds: a run, weights.json, or checkpoints/step_*/manifest.json",
    recognizes=recognizes,
    open=open_contents,
    export=_export,
)
