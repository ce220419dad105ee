"""Saves and loads weights without optimizer state: palm_ds folders and Hugging Face folders.

    weights/  weights.safetensors   every parameter in fp32 under the model's names, tied ones once
              weights.json          the encoder's config, the tasks' ids and heads, the origin,
                                    the hash of every file and its own
    hf/       model.safetensors config.json + tokenizer files: opens with AutoModel.from_pretrained

`load_weights` starts a model from either, or from a checkpoint of any other format that was opened
(model_folder.py). Folders appear complete or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from palm_ds.common.atomic import follow_umask, write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.encoder.shared_embeddings import merged_tables, parts_of_tables, split_tables
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.ngrams import without_ngrams
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.heads.pooled import PooledHead
from palm_ds.model.heads.replaced_tokens import ReplacedTokenHead
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import TextPooling
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import OPTIMIZER, CheckpointContents
from palm_ds.weights.formats.contents import HeadInfo as HeadInfo
from palm_ds.weights.formats.huggingface.model_card import Provenance, model_card
from palm_ds.weights.formats.huggingface.names import State, lost
from palm_ds.weights.formats.huggingface.sentence_transformers import FOLDER as MODULES_FOLDER
from palm_ds.weights.formats.huggingface.text_pooling import write_pooling
from palm_ds.weights.formats.huggingface.write import ExportOptions, plan, write
from palm_ds.weights.formats.native import WEIGHTS
from palm_ds.weights.formats.tensor_files import in_memory_entry
from palm_ds.weights.formats.weights_info import WeightsInfo, write_info
from palm_ds.weights.starting_weights import ChosenWeights, choose_layers, expand_embeddings

# What must be equal for weights to mean the same in another model.
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "feed_forward_size",
    "max_positions",
    "token_types",
    "task_types",
)
_UNSEEN_KEYS = ("num_heads", "activation", "head_activation", "layer_norm_eps", "position_offset")
_MAX_NAMED = 6
"""Class names in a message."""
_COMPARED_KEYS = ("kind", "options", *_SHAPE, *_UNSEEN_KEYS)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Report on the weights that were loaded."""

    folder: Path
    loaded: tuple[str, ...]
    newly_initialized: tuple[str, ...]
    """Parameters of the model that the folder lacks."""
    unused: tuple[str, ...]
    """Parameters of the folder that the model lacks."""
    notes: tuple[str, ...] = ()
    """Other remarks."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Human-readable."""
        lines = [f"weights: {len(self.loaded)} parameters from {self.folder}"]
        if self.newly_initialized:
            names = ", ".join(_by_head(self.newly_initialized))
            lines.append(f"weights: not in {self.folder}, newly initialized: {names}")
        if self.unused:
            lines.append(f"weights: skipped in {self.folder}: {', '.join(_by_head(self.unused))}")
        return [*lines, *(f"weights: {note}" for note in self.notes)]


def _by_head(names: Sequence[str]) -> list[str]:
    """The names, with one for all parameters of a head: `heads.topic (2 parameters)`."""
    heads = Counter(".".join(name.split(".")[:2]) for name in names if name.startswith("heads."))
    other = [name for name in names if not name.startswith("heads.")]
    return [*other, *(f"{head} ({count} parameters)" for head, count in heads.items())]


def save_weights(
    state: Mapping[str, torch.Tensor] | Model,
    folder: Path,
    info: WeightsInfo,
    *,
    tokenizer: Tokenizer | None = None,
    text_tokenizer: Tokenizer | None = None,
    pooling: TextPooling | None = None,
    adapter: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a portable folder; an existing one is replaced once the new one is complete.
    `text_tokenizer`: see CheckpointContents. `pooling`: how the model was trained to turn texts
    into vectors, if it was. `adapter`: LoRA's matrices, in a file of their own; those of `state`
    are merged."""
    tensors = {name: tensor.contiguous() for name, tensor in _state(state).items()}

    def write(part: Path) -> None:
        save_file(tensors, part / WEIGHTS, {"format": "pt"})
        follow_umask(part / WEIGHTS)
        if tokenizer is not None:
            tokenizer.save(part / "tokenizer")
        if text_tokenizer is not None:
            text_tokenizer.save(part / native.TEXT_TOKENIZER)
        if pooling is not None:
            sizes = {"hidden_size": info.backbone.hidden_size}
            write_pooling(
                pooling, part / MODULES_FOLDER, max_length=info.backbone.max_length, **sizes
            )
        if adapter:
            save_file(dict(adapter), part / native.ADAPTER, {"format": "pt"})
            follow_umask(part / native.ADAPTER)
        write_info(part, info)

    write_folder_atomically(folder, write)


def export_hf(
    state: Mapping[str, torch.Tensor] | Model,
    folder: Path,
    *,
    config: EncoderConfig,
    tokenizer: Tokenizer | None = None,
    family: str = "",
    task_id: int = 0,
    task_ids: Mapping[str, int] | None = None,
    token_heads: Sequence[str] = (),
    outputs: Mapping[str, HeadOutputs] | None = None,
    head: ExportedHead | None = None,
    pooling: TextPooling | None = None,
    words: str = "",
    made: Provenance | None = None,
) -> None:
    """Write a folder that AutoModel, AutoModelForMaskedLM, AutoTokenizer and sentence-transformers
    open.

    An encoder with task embeddings becomes an Ernie model with use_task_id, any other a Bert or
    Roberta model. Hugging Face uses task 0 by default, so rows 0 and `task_id` of the task
    embedding are swapped. With `family` bert, row `task_id` is folded into the token type
    embeddings instead, for programs that do not know Ernie. The model gets the first masked-LM
    head, and a head `next_sentence` with two classes; the heads of other tasks have no place in it.
    `head` is a classification head to export instead (for AutoModelForSequenceClassification and
    the like). `task_ids`: {head: the row of the task embedding of its texts}. `token_heads`: heads
    that do not read whole texts (a Model knows its own). `outputs`: what the scores of the heads
    mean, if known. `pooling`: how texts become vectors (the mean of their tokens). `words`: the
    masked-LM head to write (the first). `made`: the facts for a README.md, or None for none.
    formats/huggingface has more options.
    """
    tensors = _state(state)
    if isinstance(state, Model):
        token_heads = token_heads_of(state)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    heads = native.heads_of(shapes, token_heads, outputs or {})
    entries = {name: in_memory_entry(name, tensor) for name, tensor in tensors.items()}
    if config.task_types:
        heads = native.with_task_ids(heads, {}, task_ids or {})
    target = ExportOptions(
        family=family, task_id=task_id, pooling=pooling or TextPooling(), words=words
    )
    if head:
        heads[head.name] = replace(heads[head.name], outputs=head.outputs)
        target = replace(target, task_id=head.task_id, head=head.name)
    planned = plan(entries, config, heads, target)
    card = model_card(planned, made) if made else ""
    write_folder_atomically(
        folder, lambda part: write(planned, part, tokenizer=tokenizer, card=card)
    )


def load_weights(
    contents: CheckpointContents,
    model: Model,
    *,
    labels: Mapping[str, Sequence[str]] | None = None,
    new_heads: Collection[str] = (),
    layers: Sequence[int] | None = None,
    renamed_heads: Mapping[str, str] | None = None,
) -> LoadReport:
    """Start a model from an opened checkpoint of any format (model_folder.open_model).

    The encoder must be the same and complete (a Hugging Face folder may lack the pooler); a custom
    encoder takes what fits by name. Heads are matched by name, except that the folder's only
    masked-LM head goes to every masked-LM head, whatever the tasks are called; `new_heads` stay
    unchanged. `renamed_heads`: {head of the folder: head of the model}; all others are then left
    out. `labels`: {head: class names}, which must not be the folder's in another order. `layers`:
    only these of a larger encoder (weights/starting_weights.py). A task embedding and token types
    that the folder lacks are added (weights/starting_weights.py). Raises UserError if
    anything does not fit; the model is then unchanged.
    """
    folder = contents.path
    state, unknown = _read(contents)
    names = model.state_dict()
    own, chosen = merged_tables(names), None
    if layers is not None:
        chosen = _chosen(contents, state, model, layers)
        state = chosen.state
    config = chosen.config if chosen else contents.config
    notes = list(chosen.notes if chosen else ())
    config, grown, more = expand_embeddings(config, state, model.backbone.config, folder)
    state, notes = {**state, **grown}, [*notes, *more]
    check_same(config, model.backbone.config, folder)
    if renamed_heads is not None:
        contents, state = _with_heads(contents, state, renamed_heads)
    for kind, head_class in _ALIKE.items():
        state = _share_head(state, contents.heads, model, kind, head_class)
    dropped = tuple(f"heads.{name}." for name in new_heads)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(dropped)}
    _check_decoders(state, own, folder)
    named = {name: (labels or {}).get(name, ()) for name in contents.heads}
    kept_heads = {k: v for k, v in named.items() if k not in new_heads}
    _check_pooling(contents, kept_heads, model)
    notes += _check_heads(contents, kept_heads, own)
    missing = [name for name in own if name not in state]
    other = chosen is not None or contents.config.kind != model.backbone.config.kind
    written = without_ngrams(own)
    needed = [name for name in missing if name in written and name.startswith("backbone.")]
    lacking = [name for name in needed if ".pooler." not in name]
    if lacking and not other:
        raise UserError(f"{folder}: incomplete, it has no {lacking[0]} ({len(lacking)} missing)")
    check_shapes(own, state, folder)
    taken = {name: tensor for name, tensor in state.items() if name in own}
    check_finite(taken, folder)
    model.load_state_dict(split_tables({**own, **taken, **_first_tables(taken, names)}, names))
    unused = (*(name for name in state if name not in own), *unknown)
    return LoadReport(
        folder=folder,
        loaded=tuple(taken),
        newly_initialized=tuple(missing),
        unused=unused,
        notes=tuple(notes),
    )


def _chosen(
    contents: CheckpointContents, state: State, model: Model, layers: Sequence[int]
) -> ChosenWeights:
    words = [name for name, head in contents.heads.items() if head.kind == "masked_words"]
    return choose_layers(
        state,
        contents.config,
        model.state_dict(),
        model.backbone.config,
        layers=layers,
        folder=contents.path,
        masked_words=words,
    )


# ---- reading ----


def _read(contents: CheckpointContents) -> tuple[State, list[str]]:
    """The values, and the names of what is left out."""
    state = {name: entry.read() for name, entry in contents.entries.items()}
    skipped = {name: why for name, why in contents.skipped.items() if not why.startswith(OPTIMIZER)}
    return state, lost(skipped)


def _with_heads(
    contents: CheckpointContents, state: State, names: Mapping[str, str]
) -> tuple[CheckpointContents, State]:
    """Only these heads, under other names."""
    heads = {names[name]: head for name, head in contents.heads.items() if name in names}
    renamed = {name: value for name, value in state.items() if not name.startswith("heads.")}
    for old, new in names.items():
        prefix = f"heads.{old}."
        parts = {
            n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)
        }
        renamed |= {f"heads.{new}.{part}": tensor for part, tensor in parts.items()}
    return replace(contents, heads=heads), renamed


# ---- fitting ----


def check_same(source: EncoderConfig, target: EncoderConfig, folder: Path) -> None:
    """Raises UserError if the configs do not fit. For a custom encoder the shapes of the tensors
    decide."""
    own, custom = source.kind == target.kind, is_custom(target.kind)
    if not own and not custom and not encoder_class(target).takes_layers:
        raise UserError(
            f"{folder}: is {source.kind}, but this model is {target.kind}; `init_layers: []` takes "
            "its word embeddings alone"
        )
    names = _COMPARED_KEYS if own or not custom else _UNSEEN_KEYS
    for name in names:
        there, here = _value(source, name), _value(target, name)
        if there != here:
            key = "intermediate_size" if name == "feed_forward_size" else name
            raise UserError(f"{folder}: has backbone.{key} {there!r}, but this model has {here!r}")


def _value(config: EncoderConfig, name: str) -> Any:
    """A hyperparameter; of `options`, those of the encoder with their defaults."""
    return (
        encoder_class(config).encoder_options(config)
        if name == "options"
        else getattr(config, name)
    )


def _check_decoders(state: State, own: State, folder: Path) -> None:
    """Raises UserError if a masked-LM head has its own output embeddings on one side alone."""
    for name in own:
        decoder = name.removesuffix(".dense.weight") + ".decoder"
        if name not in state or not name.endswith(".dense.weight") or not name.startswith("heads."):
            continue
        if (decoder in own) != (decoder in state):
            raise UserError(
                f"{folder}: has backbone.tie_word_embeddings {str(decoder not in state).lower()}, "
                f"but this model has {str(decoder not in own).lower()}"
            )


def check_shapes(own: State, state: State, folder: Path) -> None:
    for name, tensor in state.items():
        if name in own and tensor.shape != own[name].shape:
            raise UserError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, but {tuple(own[name].shape)} "
                "in this model"
            )


def check_finite(state: State, folder: Path) -> None:
    """Raises UserError if a value is NaN or infinite: nothing could be learned or predicted."""
    bad = [
        name
        for name, value in state.items()
        if value.is_floating_point() and not value.isfinite().all()
    ]
    if bad:
        values = state[bad[0]]
        count = int((~values.isfinite()).sum())
        more = f"; {len(bad) - 1} more parameters have such values" if bad[1:] else ""
        raise UserError(
            f"{folder}: {count:,} of {values.numel():,} values of {bad[0]} are not finite (NaN or "
            f"infinity){more}; use earlier weights"
        )


def _first_tables(taken: State, names: Collection[str]) -> State:
    """The tables of a generator that is not loaded, where the model has differences from these:
    those of the discriminator, so that the differences are 0."""
    parts = parts_of_tables(names)
    return {
        part.base: taken[y] for y, part in parts.items() if y in taken and part.base not in taken
    }


def _check_pooling(contents: CheckpointContents, names: Iterable[str], model: Model) -> None:
    """Raises UserError for a head of whole texts that read something else in the checkpoint."""
    here = dict(model.heads.items())
    for name in names:
        info, head = contents.heads[name], here.get(name)
        if info.kind != "classes" or not isinstance(head, ClassHead | PooledHead):
            continue
        if head.averaged != info.outputs.averaged:
            was, now = ("mean", "pooler") if info.outputs.averaged else ("pooler", "mean")
            raise UserError(
                f"{contents.path}: its head {name!r} was trained with `pooling: {was}`, the task "
                f"of that name here has {now}; make them equal, or set `new_head: true`"
            )


def _check_heads(
    contents: CheckpointContents, named: Mapping[str, Sequence[str]], own: State
) -> list[str]:
    """Notes on heads that were trained for other classes. Raises UserError for a head of another
    number of classes, or with the same classes in another order."""
    notes = []
    for head, here in named.items():
        info, bias = contents.heads[head], own.get(f"heads.{head}.out.bias")
        there = info.outputs.labels
        if info.kind != "classes" or bias is None:
            continue
        if len(bias) != info.classes or (sorted(there) == sorted(here) and list(there) != [*here]):
            raise UserError(
                f"{contents.path}: its head {head!r} has {_classes(there, info.classes)}, the task "
                f"of that name here has {_classes(here, len(bias))}; set `new_head: true` on the "
                "task to initialize its head newly, give it another name, or give it the same "
                "classes (`extend` instead of init_from keeps a task and adds others)"
            )
        if there and here and list(there) != [*here]:
            was, now = _classes(there, info.classes), _classes(here, len(bias))
            notes.append(f"head {head!r} was trained for {was}, now for {now}")
    return notes


def _classes(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    return f"{count} classes ({shown})" if names else f"{count} classes"


_ALIKE = {"masked_words": MaskedLMHead, "replaced_tokens": ReplacedTokenHead}
"""{kind of heads in a checkpoint: the class of ours} where the task's name does not matter."""


def _share_head(
    state: State,
    heads: Mapping[str, HeadInfo],
    model: Model,
    kind: str,
    head_class: type[nn.Module],
) -> State:
    """The checkpoint's weights, with its only head of a kind repeated for each such head of the
    model that has none under its own name."""
    sources = [name for name, head in heads.items() if head.kind == kind]
    targets = [name for name, head in model.heads.items() if isinstance(head, head_class)]
    targets = [name for name in targets if name not in sources]
    if len(sources) != 1 or not targets:
        return state
    prefix = f"heads.{sources[0]}."
    parts = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    rest = {name: value for name, value in state.items() if not name.startswith(prefix)}
    kept = [*targets, *(name for name in sources if name in model.heads)]
    return rest | {f"heads.{name}.{part}": x for name in kept for part, x in parts.items()}


# ---- writing ----


def token_heads_of(model: Model) -> tuple[str, ...]:
    """Classification heads that read tokens; the others read whole texts."""
    of_classes = {x: y for x, y in model.heads.items() if isinstance(y, ClassHead | CRFHead)}
    return tuple(x for x, head in of_classes.items() if not (head.pooled or head.averaged))


def _state(source: Mapping[str, torch.Tensor] | Model) -> State:
    """The state in fp32 on the CPU, tied tensors once (under the backbone's name), embeddings with
    their differences from a generator's added."""
    whole = source.state_dict() if isinstance(source, Model) else source
    state = without_ngrams(merged_tables(whole))
    kept = {name: value for name, value in state.items() if not name.endswith(".tied_words")}
    return {name: value.detach().to("cpu", torch.float32) for name, value in kept.items()}
