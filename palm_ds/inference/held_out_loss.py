"""Masked-token losses of a model on texts of a corpus and on minimal pairs, to compare models with.

    loss = masked_lm_loss(TrainedModel.open("runs/mine"), open_corpus("data/test"))
    loss.nats, loss.perplexity, loss.accuracy, loss.tokens
    scores = score_minimal_pairs(TrainedModel.open("runs/mine"), ["blimp/*.jsonl"])
    scores.mean, scores.paradigms["npi_present_1"].accuracy

In a corpus, 15 % of the tokens are predicted, each by itself, 80 % of them shown as [MASK], 10 % as
a random token: the same tokens for every model of one tokenizer, whatever it was trained on. A
model that reads from left to right predicts all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus
from palm_ds.data.reader.minimal_pairs import read_paradigms
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.stream.packing import row_capacity
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, build_rows, held_out_rows
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.inference.fill_mask import Filler
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.heads.outputs import Reading
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.causal_language_model import CausalLanguageModel
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup
from palm_ds.train.evaluate.minimal_pairs import PairScore, PairScores, pair_set, rows_within_memory
from palm_ds.weights.formats.huggingface.names import MASKED_WORDS

RATE = 0.15
_SEED = 1


@dataclass(frozen=True)
class MaskedLMLoss:
    """Means over the predicted tokens."""

    nats: float
    accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))


def masked_lm_loss(
    model: TrainedModel,
    corpus: Corpus,
    *,
    held_out: float = 0.0,
    examples: int = 1000,
    length: int = 512,
) -> MaskedLMLoss:
    """The loss on the first `examples` texts of a corpus of at most `length` tokens. `held_out`:
    only the documents that a recipe with this value holds out; all by default. Raises UserError if
    the model has no masked-LM head, or the corpus another tokenizer."""
    filler = filler_for(model, corpus)
    config = filler.model.backbone.config
    length = min(length, config.max_length)
    batches = masked_batches(
        corpus,
        held_out=held_out,
        examples=examples,
        length=length,
        rows=max(model.tokens // length, 1),
        task_id=filler.task_id,
        segments=config.token_types,
        reading=filler.reading,
    )
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        sums += _sums(filler.model, batch, model.device)
    loss, right, count = sums.tolist()
    if not count:
        raise UserError(f"{corpus.path}: has no text whose tokens can be predicted")
    return MaskedLMLoss(loss / count, right / count, int(count))


def filler_for(model: TrainedModel, corpus: Corpus) -> Filler:
    """A predictor of the masked tokens of a corpus. Raises UserError as `masked_lm_loss`."""
    if model.tokenizer.fingerprint != corpus.tokenizer().fingerprint:
        raise UserError(
            f"{corpus.path}: prepared with a tokenizer other than that of {model.path}; prepare it "
            f"with `--tokenizer {model.contents.tokenizer}`"
        )
    return model.filler()


def masked_batches(
    corpus: Corpus,
    *,
    held_out: float = 0.0,
    examples: int,
    length: int,
    rows: int,
    task_id: int = 0,
    segments: int = 0,
    reading: Reading = "masked",
) -> Iterator[Batch]:
    """The texts in batches of `rows` packed rows, with labels of one task."""
    training, held = split_corpus(corpus, held_out, ())
    dataset = TaskGroupDataset(
        name=MASKED_WORDS,
        tasks=(_task(reading),),
        task_id=task_id,
        source=held if held_out else training,
        seed=_SEED,
        max_length=length,
        fixed=True,
        segments=segments,
    )
    packed = held_out_rows(dataset, 0, examples)
    for first in range(0, len(packed), rows):
        yield build_rows([dataset], packed[first : first + rows], length, corpus.vocabulary.pad)


def _task(reading: Reading) -> CorpusTask:
    if reading == "causal":
        return CausalLanguageModel(name=MASKED_WORDS)
    shifted = reading == "shifted"
    return KnowledgeMasking(name=MASKED_WORDS, rate=RATE, units=("token",), shifted=shifted)


def _sums(words: Model, batch: Batch, device: torch.device) -> torch.Tensor:
    """(3,) the loss, the correct predictions and the number of the predicted tokens of a batch."""
    with torch.no_grad():
        output = words(batch.to(device))[MASKED_WORDS]
    count = batch.count(MASKED_WORDS)
    return torch.tensor([float(output.loss_sum), float(output.correct), float(count)]).double()


def score_minimal_pairs(
    model: TrainedModel,
    files: str | Sequence[str],
    score: PairScore = "unmasked",
    *,
    task: str = "",
    group: ProcessGroup = SINGLE_PROCESS,
    done: Callable[[int, int], None] = lambda inputs, of: None,
) -> PairScores:
    """The accuracies on the pairs of files, each a paradigm; every process of the group reads its
    share. `score` and `done`: see train/evaluate/minimal_pairs.py; `task`: see
    `TrainedModel.filler`. Raises UserError, also if the model has no masked-LM head."""
    paradigms, filler = read_paradigms(files), model.filler(task)
    backbone = filler.model.backbone
    pairs = pair_set(
        paradigms,
        filler.tokenizer,
        task=MASKED_WORDS,
        task_id=filler.task_id,
        most=backbone.config.max_length,
        score=score,
        reading=filler.reading,
    )
    length = row_capacity(backbone.kernels.attention, pairs.longest) or model.tokens
    rows = max(model.tokens // length, 1)

    def logits(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return filler.model.logits(batch.to(model.device), MASKED_WORDS)

    losses = pairs.losses(
        logits,
        length=length,
        rows=rows_within_memory(rows, length, backbone.word.num_embeddings),
        rank=group.rank,
        world=group.world,
        done=done,
    )
    return pairs.scores(np.sum(group.gather(losses), axis=0))
