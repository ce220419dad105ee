"""Reads BERT as Google published it: TensorFlow's bert_model.ckpt, bert_config.json, vocab.txt.

The names are Hugging Face's with other separators: one table serves both
(huggingface/architectures/bert.py).
Matrices are (in, out), except for the output weights of heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.contents import OPTIMIZER, CheckpointContents, TensorEntry
from palm_ds.weights.formats.expected_shapes import checked
from palm_ds.weights.formats.foreign_config import FOREIGN_KEYS, read_encoder_config
from palm_ds.weights.formats.format import Format
from palm_ds.weights.formats.huggingface.architecture import CLASSIFIER, NEXT_SENTENCE
from palm_ds.weights.formats.huggingface.check_config import check_foreign_values
from palm_ds.weights.formats.huggingface.names import heads_in, to_palm_ds_names
from palm_ds.weights.formats.tensor_files import read_json
from palm_ds.weights.formats.tensorflow.tensor_bundle import is_index, open_bundle

CONFIG, INDEX = "bert_config.json", ".index"
_EPS = 1e-12  # in BERT's code, not in its config
_WORDS = "bert/embeddings/word_embeddings"
_ENDS = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "output_weights": "weight",
    "output_bias": "bias",
    "word_embeddings": "word_embeddings.weight",
    "position_embeddings": "position_embeddings.weight",
    "token_type_embeddings": "token_type_embeddings.weight",
}
_SPECIAL = {
    "cls/predictions/output_bias": "cls.predictions.bias",
    "output_weights": "classifier.weight",  # of run_classifier.py
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}
_OPTIMIZER = re.compile(r"(^|/)(adam_[mv]|AdamWeightDecayOptimizer(_1)?|LAMBOptimizer.*)$")


def recognizes(path: Path) -> bool:
    """Whether the path is a TensorFlow checkpoint, or a folder with one."""
    try:
        return any(is_index(file) for file in _found(Path(path)))
    except (OSError, ValueError):
        return False


def open_contents(path: Path, *, eps: float | None = None) -> CheckpointContents:
    """Open a checkpoint: the folder, `bert_model.ckpt` in it, or its .index file.

    `eps`: LayerNorm's, if it is not the 1e-12 of BERT's code.
    """
    path = Path(path)
    index = _the_one(path)
    config = _config(index, eps)
    bundle = open_bundle(index)
    if _WORDS not in bundle.entries:
        raise UserError(f"{index}: not a BERT checkpoint: it has no {_WORDS}")
    stored, skipped = _sorted(bundle.entries)
    entries, more = to_palm_ds_names(stored, "bert", config, str(index))
    if config.vocab_size is None:
        config = replace(config, vocab_size=entries["backbone.word.weight"].shape[0])
    vocabulary = index.parent / "vocab.txt"
    contents = CheckpointContents(
        path=index.with_suffix(""),
        format="TensorFlow BERT",
        config=config,
        entries=entries,
        heads=heads_in(entries, pooled=(NEXT_SENTENCE, CLASSIFIER)),
        skipped={**bundle.skipped, **skipped, **more},
        tokenizer=vocabulary if vocabulary.is_file() else None,
        notes=_notes(entries, eps),
    )
    return checked(contents)


def _found(path: Path) -> list[Path]:
    """The index files that a path may mean."""
    if path.is_dir():
        return sorted(path.glob(f"*{INDEX}"))
    file = path if path.suffix == INDEX else path.with_name(path.name + INDEX)
    return [file] if file.is_file() else []


def _the_one(path: Path) -> Path:
    indices = _found(path)
    if not indices:
        raise UserError(f"{path}: not a TensorFlow checkpoint: no *{INDEX}")
    if len(indices) > 1:
        names = ", ".join(x.name.removesuffix(INDEX) for x in indices)
        raise UserError(f"{path}: contains several checkpoints; give one of them: {names}")
    return indices[0]


def _config(index: Path, eps: float | None) -> EncoderConfig:
    path = index.parent / CONFIG
    about = read_json(path)
    check_foreign_values(about, str(path))
    known: dict[str, Any] = {key: value for key, value in about.items() if key in FOREIGN_KEYS}
    known = {"layer_norm_eps": _EPS, **known} if eps is None else {**known, "layer_norm_eps": eps}
    return read_encoder_config(known, str(path))


def _sorted(stored: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors with Hugging Face's names and orientation, and {skipped name: why}."""
    entries: dict[str, TensorEntry] = {}
    skipped = {}
    for name, entry in stored.items():
        if name == "global_step" or _OPTIMIZER.search(name):
            skipped[name] = OPTIMIZER
        else:
            entries[_renamed(name)] = _transposed(entry) if name.endswith("/kernel") else entry
    return entries, skipped


def _renamed(name: str) -> str:
    if name in _SPECIAL:
        return _SPECIAL[name]
    parts = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name).split("/")
    return ".".join([*parts[:-1], _ENDS.get(parts[-1], parts[-1])])


def _transposed(entry: TensorEntry) -> TensorEntry:
    if len(entry.shape) != 2:
        return entry
    return replace(
        entry,
        shape=entry.shape[::-1],
        read=lambda: entry.read().T.contiguous(),
        transform="transposed",
    )


def _notes(entries: Mapping[str, TensorEntry], eps: float | None) -> tuple[str, ...]:
    notes = []
    if eps is None:
        notes.append("LayerNorm's eps is not in bert_config.json: 1e-12, that of BERT's code")
    if f"heads.{CLASSIFIER}.out.weight" in entries:
        notes.append("assuming that the classifier reads whole texts, as in run_classifier.py")
    return tuple(notes)


FORMAT = Format(
    name="tensorflow",
    looks_for="TensorFlow: *.ckpt.index with *.ckpt.data-*",
    recognizes=recognizes,
    open=open_contents,
)
