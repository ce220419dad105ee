"""Texts that a client has tokenized: their ids with special tokens, as of `/tokenize`.

    TokenIds.of(ids, types).check(limits)      what no model has to be known for
    .packed(model, most)                       what the encoder reads

Tasks read them where they answer for a text as a whole, by what is at its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.stream.task_group_dataset import BuiltExample
from palm_ds.data.tasks.task import TableTask
from palm_ds.model.inputs.batch import PackedText
from palm_ds.serve.limits import RequestError, ServingLimits
from palm_ds.serve.served_model import ServedModel


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """The ids of some texts."""

    ids: Sequence[Sequence[int]]
    types: Sequence[Sequence[int]] = ()
    """Token types; empty: 0 everywhere."""
    name: str = "input_ids"
    """In messages."""

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, limits: ServingLimits) -> None:
        """Raises RequestError for too many texts, and for token types of other texts."""
        if len(self) > limits.max_texts:
            raise RequestError(
                413, f"{self.name}: {len(self):,} texts; at most {limits.max_texts:,} in a request"
            )
        for number, each in enumerate(self.ids):
            if not each:
                raise RequestError(422, f"{self.name}[{number}]: no ids")
        if self.types and [len(x) for x in self.types] != [len(x) for x in self.ids]:
            raise RequestError(
                422, f"token_type_ids: other numbers of texts or tokens than {self.name} has"
            )

    def packed(self, model: ServedModel, most: int) -> list[PackedText]:
        """As the encoder reads them, each of at most `most` tokens. Raises UserError for ids and
        types that the model does not have."""
        encoder = model.embedder.encoder.config
        vocabulary = model.tokenizer.vocabulary.size
        for number, each in enumerate(self.ids):
            if min(each) < 0 or max(each) >= vocabulary:
                raise UserError(f"{self.name}[{number}]: an id is not in 0 to {vocabulary - 1:,}")
            if len(each) > most:
                raise UserError(
                    f"{self.name}[{number}]: {len(each):,} ids; the model reads {most:,}"
                )
        kinds = max(encoder.token_types, 1)
        for number, each in enumerate(self.types):
            if min(each) < 0 or max(each) >= kinds:
                raise UserError(f"token_type_ids[{number}]: a type is not in 0 to {kinds - 1}")
        texts = [model.embedder.encoded(np.array(each, np.int64)) for each in self.ids]
        if not self.types:
            return texts
        types = [np.array(each, np.int64) for each in self.types]
        return [replace(x, token_type_ids=y) for x, y in zip(texts, types, strict=True)]

    def in_place_of(self, built: Sequence[BuiltExample], texts: Sequence[PackedText]) -> None:
        """Put the texts into a task's examples of some row, whose labels stay. Raises UserError if
        these are not at the first token alone."""
        for one, text in zip(built, texts, strict=True):
            labels = one.example.labels.values()
            whole = not one.example.sub_lengths and all(at.tolist() == [0] for at, _ in labels)
            if not whole:
                raise UserError(
                    f"{self.name}: ids are read by tasks that answer for a text as a whole; send "
                    "`inputs`"
                )
            one.example.input_ids = text.input_ids
            one.example.token_type_ids = text.token_type_ids
            one.example.source_offsets = np.full(len(text.input_ids), -1)
            one.example.annotations = {}


def sample_row(task: TableTask) -> Mapping[str, Any]:
    """A row that a task can read, unless it needs more than texts."""
    fields = [x for x in task.form().fields if not x.optional and not x.parsed]
    return {field.role: [field.value] if field.listed else field.value for field in fields}


def given_texts(
    texts: Sequence[Any], ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], name: str
) -> Sequence[Any] | TokenIds:
    """The texts or ids of a request. Raises RequestError for both, and for types alone."""
    if texts and ids:
        raise RequestError(422, f"input_ids: {name} are given, too; send one of the two")
    if types and not ids:
        raise RequestError(
            422, f"token_type_ids: of input_ids, which are not given; {name} need none"
        )
    return TokenIds(ids=ids, types=types) if ids else texts
