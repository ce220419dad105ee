"""`palm.load`: a trained model, opened to predict, evaluate, embed and save.

    model = palm.load("runs/mine")
    model(["a fine film", "dull"])              # [{"label": "good", ...}, {"label": "bad", ...}]
    model.predict([{"text_a": "a fine film"}])  # {"sentiment": [{"label": "good", ...}]}

The rows that it was trained on are not needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch

from palm_ds.api.events import Metrics
from palm_ds.api.keywords import EmbeddingKeywords
from palm_ds.api.notebook import TaskPredictions
from palm_ds.api.predictions import listed_for, predictions_of, scores_of, select_tasks
from palm_ds.api.save_model import push_saved, save_pretrained
from palm_ds.api.text_vectors import TextVectors
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.errors import UserError
from palm_ds.common.keywords import documents
from palm_ds.common.summary import Summary
from palm_ds.data.sources.row_inputs import COLUMNS, Rows
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.embedder import EmbeddingSettings, Text
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.runtime.processes.processes import device_named
from palm_ds.train.export import head_taken
from palm_ds.weights.convert.source import locate


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadedModel(Summary):
    """A trained model on a device. `palm.load` opens it."""

    folder: Path
    """The folder from which the weights were read."""
    predictor: Predictor
    trained: TrainedModel | None = None
    """The opened folder; a model that was pickled opens it again if it has to."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the opened folder, which cannot be pickled."""
        return {"folder": self.folder, "predictor": self.predictor, "trained": None}

    def facts(self) -> dict[str, object]:
        encoder = self.predictor.model.backbone.config
        kinds = {name: type(task).__name__ for name, task in self.tasks.items()}
        return {
            "folder": self.folder,
            "tasks": ", ".join(f"{name} ({kind})" for name, kind in kinds.items()),
            "encoder": f"{encoder.num_layers} layers of {encoder.hidden_size}",
            "device": self.predictor.device,
        }

    @property
    def tasks(self) -> Mapping[str, TableTask]:
        """{name: the task with its settings} of all tasks that predict."""
        return self.predictor.tasks

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """{task: its class names, in the order of `logits` and `probs`}; tasks without classes are
        left out."""
        return {name: tuple(task.labels) for name, task in self.tasks.items() if task.labels}

    @checks_arguments()
    def __call__(self, rows: Rows, *, task: str = "") -> list[dict[str, Any]]:
        """A prediction for each row, in order, by the only task or the one named `task`. Raises
        UserError if there are several and none is named."""
        if not task and len(self.tasks) > 1:
            raise UserError(f"task: choose one of {', '.join(self.tasks)}; `predict` runs all")
        return self.predict(rows, task=task or next(iter(self.tasks)))[
            task or next(iter(self.tasks))
        ]

    @checks_arguments(columns=COLUMNS)
    def predict(
        self,
        rows: Rows,
        *,
        task: str = "",
        columns: Mapping[str, Any] | None = None,
        format: str = "",
        generate: Mapping[str, Any] | None = None,
    ) -> TaskPredictions:
        """{task: a prediction for each row, in order}, for one task or for all tasks that can read
        such rows: texts, pairs, mappings, a Dataset, a DataFrame, files (docs/api.md). Labels are
        not needed. `columns`: {role: column}. `format`: that of files, if it differs from training.
        `generate`: settings of text generation, such as {"beams": 5} (docs/generation.md). Raises
        UserError."""
        predictor = self._for(task).generating(generate or {})
        given = listed_for(predictor, rows)
        return TaskPredictions(predictions_of(predictor, given, SINGLE_PROCESS, columns, format))

    @checks_arguments()
    def evaluate(self, rows: Rows, *, task: str = "") -> Metrics:
        """{task: {metric: value}} on rows with labels. Raises UserError."""
        predictor = self._for(task)
        given = listed_for(predictor, rows)
        names = predictor.tasks
        return {name: scores_of(predictor, name, given, SINGLE_PROCESS) for name in names}

    @documents(EmbeddingSettings)
    def embed(
        self, texts: str | Sequence[Text], **settings: Unpack[EmbeddingKeywords]
    ) -> torch.Tensor | list[torch.Tensor]:
        """The encoder's vectors of texts, (texts, hidden) float32, as `palm.Backbone` gives them.
        Raises UserError."""
        return self._vectors(texts, settings)

    @documents(EmbeddingSettings)
    def words(
        self, texts: str | Sequence[Text], **settings: Unpack[EmbeddingKeywords]
    ) -> list[dict[str, float]]:
        """The sparse vectors of texts as {token: weight}, the largest weight first. Raises
        UserError for a model without them."""
        return self._vectors.words(texts, settings)

    @cached_property
    def _vectors(self) -> TextVectors:
        encoder, device = self.predictor.model.backbone, self.predictor.device
        trained = self.trained or TrainedModel.open(self.folder, device=device)
        exact = replace(trained, precision="fp32", batch_tokens=0)
        return TextVectors(open=partial(exact.embedder, encoder=encoder))

    def _for(self, task: str) -> Predictor:
        names = [task] if task else []
        return select_tasks(self.predictor, names, self.folder) if names else self.predictor

    # ---- writing ----

    @checks_arguments()
    def save(self, folder: str | Path) -> Path:
        """Write the weights of all tasks with everything needed to read them, for `palm.load`,
        `init_from` and palm-ds predict."""
        if not (self.folder / "weights.json").is_file():
            raise UserError(f"{self.folder}: has no weights.json to save; use save_pretrained")
        target = Path(folder)
        if target.exists() and not target.is_dir():
            raise UserError(f"{target}: is a file; give a folder")
        if target.resolve() != self.folder.resolve():
            shutil.copytree(self.folder, target, dirs_exist_ok=True)
        return target

    @checks_arguments()
    def save_pretrained(self, folder: str | Path, *, task: str = "") -> Path:
        """Write a folder for transformers' Auto classes and `pipeline`: the encoder with the head
        of a task, or of the only task; with several tasks and no `task`, the encoder alone.
        Raises UserError for a task that transformers has no class for."""
        row = task if self.predictor.recipe.backbone_config.task_types else ""
        return save_pretrained(self.folder, folder, head=self._head(task), task=row)

    @checks_arguments()
    def push_to_hub(
        self,
        name: str,
        *,
        task: str = "",
        private: bool = False,
        token: str | None = None,
        revision: str = "",
    ) -> str:
        """`save_pretrained` to the repository `name` of the Hugging Face hub; returns its URL.
        Raises UserError, or TemporaryError if trying again may help."""
        return push_saved(
            lambda folder: self.save_pretrained(folder, task=task),
            name,
            private=private,
            token=token,
            revision=revision,
        )

    def _head(self, task: str) -> str:
        """The name of the head to export; empty for none."""
        recipe = self._for(task).recipe
        if not task:
            taken = head_taken(recipe, self.predictor.model.state_dict())
            return taken.name if taken else ""
        head = self._for(task).tasks[task].hf_export()
        if head is None:
            raise UserError(f"task: transformers has no class for {task!r}; `save` keeps it")
        return head.name


@checks_arguments(tasks="a list of names")
def load(
    path: str | Path,
    *,
    tasks: Sequence[str] = (),
    device: torch.device | str = "",
    precision: str = "fp32",
    batch_tokens: int = 0,
) -> LoadedModel:
    """Open a trained model: a run folder (its weights/, else best/, else its newest good
    checkpoint), one of these, what `save` wrote, or a Hugging Face folder with a head, or
    `org/name` of one on the hub.

    `tasks`: only these. `device`: by default a GPU if there is one. `precision`: fp32, bf16 or
    fp16. `batch_tokens`: approximate tokens of a batch; 0 chooses for the device. Raises
    UserError."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = TrainedModel.open(
        locate(Path(path))[0],
        device=device_named(str(chosen)),
        precision=precision,
        batch_tokens=batch_tokens,
    )
    predictor = trained.predictor(tasks)
    return LoadedModel(folder=trained.path, predictor=predictor, trained=trained)
