"""A trained model of any path, opened once, and what it can be used for.

    opened = TrainedModel.open("runs/mine", device="cuda")     model_folder.py: which weights
    opened.predictor(["sentiment"])     its tasks on rows of tables
    opened.embedder(settings)           vectors of texts
    opened.filler()                     masked words

Each builds its model when it is asked for; predictors share one. Only a run, and a Hugging Face
folder with a head, have tasks; the other two work with a checkpoint of any format.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, cast

import torch
from pydantic import NonNegativeInt

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Settings, one_of
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.stream.packing import batch_tokens_for
from palm_ds.data.tasks.task import TableTask, build
from palm_ds.inference.embedder import (
    Embedder,
    EmbeddingSettings,
    complete_settings,
    make_embedder,
    splade_head,
)
from palm_ds.inference.fill_mask import Filler, example_lines
from palm_ds.inference.model_tasks import asked_tasks, check_numbers, recipe_of
from palm_ds.inference.predictor import Predictor
from palm_ds.model.config.encoder_kinds import shipped_class
from palm_ds.model.encoder.encoder import PLAIN, Encoder, build_encoder, encoder_class, has_windows
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.outputs import Reading
from palm_ds.model.kernels import Kernels, choose_kernels
from palm_ds.model.multi_task_model import Model, prepare_to_predict
from palm_ds.model.pooling import SPLADE
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.device.torch_settings import DTYPES, describe_slow_precision
from palm_ds.text.exported_tokenizer import other_inputs
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model
from palm_ds.weights import weights_folder
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents, fitting_tokenizer, read_tokenizer
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface.architecture import MASKED_WORDS
from palm_ds.weights.formats.weights_info import INFO
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import LoadReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedModel(Settings):
    """An opened model."""

    contents: CheckpointContents
    device: torch.device = torch.device("cpu")
    precision: Annotated[str, one_of(DTYPES)] = "fp32"
    batch_tokens: NonNegativeInt = 0
    """Approximate tokens of a batch; 0 chooses for the device."""
    given_tokenizer: Tokenizer | None = None
    """Instead of the model's own."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        batch_tokens: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> TrainedModel:
        """Open a run folder (its weights/, else best/, else its newest good checkpoint, with a
        warning that says which), or a checkpoint of any format. Raises UserError."""
        contents = open_model(path)
        for note in contents.notes_on_use:
            log.warning("%s", note)
        model = cls(
            contents=contents,
            device=torch.device(device),
            precision=precision,
            batch_tokens=batch_tokens,
            given_tokenizer=tokenizer,
        )
        if slow := describe_slow_precision(precision, model.device):
            log.warning("%s", slow)
        return model

    @property
    def path(self) -> Path:
        """The folder or file of the weights."""
        return self.contents.path

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def tokens(self) -> int:
        """Approximate tokens of a batch."""
        return self.batch_tokens or batch_tokens_for(self.device)

    # ---- what it was trained with ----

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that trained it, or one with the heads of a Hugging Face folder. Raises
        UserError for a model without tasks."""
        if (self.path / INFO).is_file():
            if not self.contents.recipe.get("tasks"):
                raise UserError(
                    f"{self.path}: its {INFO} does not name the tasks it was trained on; "
                    "give a folder that palm-ds finetune wrote"
                )
            return make_recipe(dict(self.contents.recipe), str(self.path / INFO))
        if huggingface.recognizes(self.path):
            return recipe_of(self.contents)
        if not self._is_checkpoint:
            raise UserError(
                f"{self.path}: neither a run folder nor a weights folder: it is "
                f"{self.contents.format}, which names no tasks"
            )
        values = self.contents.recipe or native.recipe_of_run(self.path)
        return make_recipe(dict(values), str(self.path.absolute().parent.parent / "recipe.yaml"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with. Raises UserError if it is not known."""
        if self.given_tokenizer is not None:
            return self.given_tokenizer
        if self.contents.tokenizer is None:
            of = ", and the one its recipe names is not there" if self._is_checkpoint else ""
            raise UserError(f"{self.path}: has no tokenizer{of}")
        return fitting_tokenizer(self.contents.tokenizer, self.contents)

    @property
    def _is_checkpoint(self) -> bool:
        return native.is_checkpoint(self.path)

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer for plain texts: if those of training were simplified or lower-cased before
        they were tokenized, it does so too. Raises UserError."""
        own = None if self.given_tokenizer else read_tokenizer(self.contents)
        if own and (others := other_inputs(own)):
            log.warning("%s: %s", self.path, others)
        return own or self.tokenizer

    # ---- what it does ----

    def predictor(self, tasks: Sequence[str] = ()) -> Predictor:
        """The named tasks on rows of tables, or all that predict. Raises UserError."""
        asked = asked_tasks(self.recipe, tasks, self.path)
        model, loaded = self._loaded
        self._check_complete(asked, model, loaded)
        return Predictor(
            model=model,
            recipe=self.recipe,
            tokenizer=self.tokenizer,
            tasks=asked,
            device=self.device,
            batch_tokens=self.tokens,
            folder=self.path,
        )

    @property
    def task_model(self) -> Model:
        """The model with the heads of all tasks of the recipe."""
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> tuple[Model, LoadReport]:
        check_numbers(self.contents)
        how = DSConfig(path="", sections={}, stage=0, precision=self.precision)  # type: ignore[arg-type]
        parts = self.recipe, how, self.tokenizer.vocabulary
        model = build_model(*parts, device=self.device, encoder=self.contents.config)
        loaded = weights_folder.load_weights(self.contents, model)
        return prepare_to_predict(model, self.device, self.dtype), loaded

    def _check_complete(
        self, asked: Mapping[str, TableTask], model: Model, loaded: LoadReport
    ) -> None:
        for name in asked:
            head = model.head_of[name]
            needed = (f"heads.{head}.", "backbone.")
            unused = () if model.reads_pooler(name) else ("backbone.pooler.",)
            missing = [each for each in loaded.newly_initialized if not each.startswith(unused)]
            if lacking := [each for each in missing if each.startswith(needed)]:
                raise UserError(
                    f"{self.path}: incomplete for task {name!r}: {lacking[0]} is missing"
                )

    def embedder(
        self, settings: EmbeddingSettings | None = None, *, encoder: Encoder | None = None
    ) -> Embedder:
        """Vectors of texts. `encoder`: with the same weights on the same device; it is shared if it
        gives the same vectors. Raises UserError."""
        self.check_reads_texts()
        kernels = self._kernels
        alike = encoder and encoder.kernels == kernels
        settings, words = settings or EmbeddingSettings(), None
        if complete_settings(settings, self.contents).pooling == SPLADE:
            model = self._word_model({SPLADE: splade_head(self.contents)}, kernels)
            encoder, words = model.backbone, cast("MaskedLMHead", next(iter(model.heads.values())))
        elif encoder is None or not alike or next(encoder.parameters()).dtype != self.dtype:
            encoder = self._word_model({}, kernels).backbone
        return make_embedder(
            self.contents,
            encoder,
            self.text_tokenizer,
            settings,
            device=self.device,
            batch_tokens=self.tokens,
            words=words,
        )

    def filler(self, task: str = "") -> Filler:
        """Masked words. `task` selects the task embedding, and the head if the task has a masked-LM
        head. Raises UserError if there is no such head."""
        self.check_reads_texts()
        if not self.contents.masked_lm_heads:
            raise UserError(
                f"{self.path}: has no masked-LM head; train a task that predicts tokens, such as "
                "knowledge_masking"
            )
        task, head = _task_and_head(self.contents, task)
        return Filler(
            model=self._word_model({MASKED_WORDS: head}, PLAIN),
            tokenizer=self.text_tokenizer,
            folder=self.path,
            task=task,
            task_id=self.contents.task_ids.get(task, 0) if self.contents.config.task_types else 0,
            reading=self.reading(task, head),
        )

    def reading(self, task: str, head: str) -> Reading:
        """The place where a masked-LM head predicts a token: its task's, if the recipe is known."""
        own = dict(self.contents.recipe.get("tasks") or {}).get(task)
        if own is not None and self.contents.head_of.get(task) == head:
            return build(task, own).head_outputs().reading
        return self.contents.heads[head].outputs.reading

    def words(self) -> Model:
        """The encoder with all its masked-LM heads, by their tasks. Raises UserError."""
        self.check_reads_texts()
        heads, head_of = self.contents.masked_lm_heads, self.contents.head_of
        used = {task: head for task, head in head_of.items() if head in heads}
        return self._word_model(used or {name: name for name in heads}, self._kernels)

    def check_reads_texts(self) -> None:
        """Raises UserError for an encoder that reads windows of documents: it trains on them,
        evaluates and predicts, but reads no packed texts."""
        config = self.contents.config
        encoder = shipped_class(config.kind)
        if encoder and encoder.memory_length(config):
            raise UserError(
                f"{self.path}: {config.kind} reads documents window by window, with memories: it "
                "predicts (palm-ds predict), but embed, serve and fill-mask read packed texts, "
                "which it cannot"
            )

    @property
    def _causal_tasks(self) -> list[str]:
        """The tasks whose masked-LM heads read from left to right."""
        heads = self.contents.masked_lm_heads
        used = {task: head for task, head in self.contents.head_of.items() if head in heads}
        named = (used or {head: head for head in heads}).items()
        return [task for task, head in named if self.reading(task, head) == "causal"]

    @property
    def _kernels(self) -> Kernels:
        config = self.contents.config
        kernels, _ = choose_kernels(
            {"compile": "off"},
            device=self.device,
            dtype=self.dtype,
            config=config,
            partial_tasks=self._causal_tasks,
            windows=has_windows(config),
            score_biases=encoder_class(config).adds_to_scores(config),
            memories=encoder_class(config).memory_length(config) > 0,
        )
        return kernels

    def _word_model(self, head_of: Mapping[str, str], kernels: Kernels) -> Model:
        backbone = build_encoder(self.contents.config, kernels)
        heads = {name: MaskedLMHead(backbone) for name in dict.fromkeys(head_of.values())}
        model = Model(backbone, heads, head_of)
        weights_folder.load_weights(self.contents, model)
        return prepare_to_predict(model, self.device, self.dtype)


def _task_and_head(contents: CheckpointContents, task: str) -> tuple[str, str]:
    """The task whose embedding is used, and the masked-LM head that predicts."""
    heads = contents.masked_lm_heads
    if task and task not in contents.task_ids:
        known = suggest(task, contents.task_ids) if contents.task_ids else "; it names no tasks"
        raise UserError(f"--task {task}: no such task in {contents.path}{known}")
    reading = [name for name, head in contents.head_of.items() if head in heads]
    task = task or contents.export_task or next(iter(reading), "")
    head = contents.head_of.get(task, heads[0])
    return task, head if head in heads else heads[0]


def examples(folder: Path, source: CorpusSource) -> list[str]:
    """Masked words of some sentences of a source, predicted at the end of a run, one line each.
    Empty if the folder has no masked-LM head."""
    opened = TrainedModel(contents=open_model(folder))
    return example_lines(opened.filler(), source) if opened.contents.masked_lm_heads else []
