"""Tables of a few rows, a vocabulary of their words, and a small encoder with the heads of tasks
over them; and the same encoder as transformers has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import BertConfig, BertModel

from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.decode import decoded, gathered
from palm_ds.data.stream.task_group_dataset import (
    BuiltRow,
    TaskGroupDataset,
    build_examples,
    collate_built,
    held_out_rows,
)
from palm_ds.data.tasks.task import Task, build
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import Tokenizer, wordpiece
from tests.helpers.hf_names import from_names

T = TypeVar("T", bound=Task)
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (*LETTERS, *(f"##{letter}" for letter in LETTERS), "good", "bad", "so", "very", "?", ".")


def small_tokenizer() -> Tokenizer:
    """WordPiece of a few words and all letters: `so goods` is so, good, ##s."""
    return wordpiece([*SPECIALS, *WORDS], lower=True)


def make_task(kind: type[T], name: str, **values: Any) -> T:
    """A task of a recipe, over the source `s`."""
    module = kind.__module__.rpartition(".")[2]
    task = build(name, {"kind": module, "source": "s", **values})
    assert isinstance(task, kind)
    return task


def source_of(folder: Path, rows: Sequence[Mapping[str, Any]], **read: Any) -> TableSource:
    """Rows written as JSON lines and read again, as a source."""
    file = folder / f"rows{len(list(folder.iterdir()))}.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text("".join(lines), encoding="utf-8")
    return opened(file, **read)


def opened(file: Path, **read: Any) -> TableSource:
    """A file of rows as a source."""
    table = open_table(str(file), TableSettings(**read))
    return TableSource(table, np.arange(len(table)), small_tokenizer(), str(file))


def dataset_of(
    source: TableSource, *tasks: Task, max_length: int = 64, fixed: bool = True
) -> TaskGroupDataset:
    """The examples of a task group of tasks over all rows, in order."""
    name = " + ".join(task.name for task in tasks)
    return TaskGroupDataset(
        name, tasks, task_id=0, source=source, seed=5, max_length=max_length, fixed=fixed
    )


def built_of(dataset: TaskGroupDataset) -> tuple[list[BuiltRow], Batch]:
    """All its examples, packed, and their batch."""
    built = build_examples([dataset], held_out_rows(dataset, 0, dataset.num_items))
    return built, collate_built([dataset], built, dataset.max_length, 0)


def model_of(*tasks: Task, **changes: Any) -> Model:
    """A small encoder without dropout, with a head for each task, all its weights noisy. `changes`:
    of the encoder's hyperparameters."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = dict(
        vocab_size=small_tokenizer().size,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        max_positions=128,
        token_types=2,
        task_types=0,
        dropout=0.0,
        attention_dropout=0.0,
    )
    backbone = build_encoder(EncoderConfig(**{**sizes, **changes}))
    model = Model(
        backbone,
        {task.name: task.head(backbone) for task in tasks},
        {task.name: task.name for task in tasks},
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def predictions(
    model: Model, source: TableSource, *tasks: Task, max_length: int = 64
) -> dict[str, dict[int, dict[str, Any]]]:
    """{task: {item: prediction}} for all rows, computed from packed rows."""
    built, batch = built_of(dataset_of(source, *tasks, max_length=max_length))
    by_name = {task.name: task for task in tasks}
    with torch.no_grad():
        outputs = model(batch, by_name)
    scores = {name: x.scores for name, x in outputs.items() if x.scores is not None}
    pieces = list(decoded(built, scores, by_name, [source]))
    return {name: found for name, (_, found) in gathered(pieces, by_name, [source]).items()}


def learned(
    source: TableSource, task: Task, *, steps: int = 60, lr: float = 1e-2, **changes: Any
) -> Model:
    """A small model after some full-batch steps in plain torch. `changes`: see `model_of`."""
    model = model_of(task, **changes)
    _, batch = built_of(dataset_of(source, task))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        loss = model(batch)[task.name].loss_sum / batch.count(task.name)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


# transformers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """Texts as transformers takes them: one a row, padded."""

    ids: torch.Tensor
    segments: torch.Tensor
    mask: torch.Tensor

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "token_type_ids": self.segments, "attention_mask": self.mask}


def bert_config(**more: Any) -> BertConfig:
    """transformers' description of the encoder of `model_of`."""
    return BertConfig(
        vocab_size=small_tokenizer().size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


def same_weights(model: Model, theirs: Any, head: str) -> None:
    """Gives a model the (made noisy) weights of a BertFor...: encoder, pooler, classifier."""
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    bert: BertModel = theirs.bert
    state, _ = from_names({f"bert.{k}": v for k, v in bert.state_dict().items()}, "bert")
    state[f"heads.{head}.out.weight"] = theirs.classifier.weight.detach()
    state[f"heads.{head}.out.bias"] = theirs.classifier.bias.detach()
    model.load_state_dict(state, strict=True)


def padded(texts: Sequence[Sequence[str]]) -> Padded:
    """[CLS] text [SEP] ... of each row by itself; only the ids come from the project."""
    tokenizer = small_tokenizer()
    ids, segments = [], []
    for row in texts:
        mine, of = [2], [0]
        for number, text in enumerate(row):
            tokens = tokenizer.backend.encode(text, add_special_tokens=False).ids
            mine += [*tokens, 3]
            of += [number] * (len(tokens) + 1)
        ids.append(mine)
        segments.append(of)
    longest = max(map(len, ids))
    fill = lambda rows, value: torch.tensor(  # noqa: E731
        [row + [value] * (longest - len(row)) for row in rows]
    )
    return Padded(fill(ids, 0), fill(segments, 0), fill([[1] * len(row) for row in ids], 0))
