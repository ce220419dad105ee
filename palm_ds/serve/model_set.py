"""The models of a server by name, and which of them answers a request.

A reload opens every model again and then exchanges the whole set in one assignment: requests that
were accepted before keep the model they were given.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.messages import counted
from palm_ds.inference.search.embedded_files import open_embedded
from palm_ds.inference.search.graph import available
from palm_ds.inference.search.index import SearchIndex, is_index, likeness, made_by, open_index
from palm_ds.serve.limits import RequestError
from palm_ds.serve.requests import embed_work
from palm_ds.serve.scheduler import compute
from palm_ds.serve.served_model import ModelOptions, ServedModel, open_served


@dataclass(frozen=True, kw_only=True)
class Served:
    """Models that a server opens, by name, and a search index."""

    models: Mapping[str, Path]
    options: ModelOptions
    index: Path | None = None
    texts: Sequence[str] = ()
    column: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSet:
    """Opened models, the first of which is the default."""

    models: Mapping[str, ServedModel]
    index: SearchIndex | None = None
    index_model: str = ""
    """The model that embeds queries."""

    def named(self, name: str) -> ServedModel:
        """A model by name; the default without one. Raises RequestError."""
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RequestError(404, f"model {name!r} is not served{suggest(name, self.models)}")
        return self.models[name]

    def with_task(self, task: str, name: str) -> ServedModel:
        """The model that has a task. Raises RequestError if none does, or several do."""
        asked = [self.named(name)] if name else list(self.models.values())
        having = [x for x in asked if task in x.tasks]
        if not having:
            known = {each for model in asked for each in model.tasks}
            hint = suggest(task, known) if known else "; none has a task on rows"
            of = f" in model {name!r}" if name else ""
            raise RequestError(404, f"no task {task!r}{of}{hint}")
        if len(having) > 1:
            which = " or ".join(repr(x.name) for x in having)
            raise RequestError(409, f"{task!r} is a task of {which}: name the `model`")
        return having[0]

    def filling(self, name: str) -> ServedModel:
        """The model that predicts masked words. Raises RequestError."""
        wanted = [self.named(name)] if name else list(self.models.values())
        filler = next((model for model in wanted if model.filler), None)
        if filler is None:
            raise RequestError(
                404, "no masked-LM head in " + ", ".join(model.name for model in wanted)
            )
        return filler

    def labeling(self) -> tuple[ServedModel, str]:
        """The first model and its task that gives one or several labels to a text. Raises
        RequestError."""
        for model in self.models.values():
            for name, task in model.tasks.items():
                if task.imports in ("class", "labels"):
                    return model, name
        raise RequestError(404, f"no head that classifies texts in {', '.join(self.models)}")

    def ranks(self, name: str) -> bool:
        """Whether the named model, or any, has a head for `ranking`. Raises RequestError."""
        asked = [self.named(name)] if name else self.models.values()
        return any(task.rerank_priority > 1 for model in asked for task in model.tasks.values())

    def ranking(self, task: str, name: str) -> tuple[ServedModel, str]:
        """The model and its task that score pairs: the named one, or the first. Raises
        RequestError."""
        if task:
            model = self.with_task(task, name)
            if not model.tasks[task].rerank_priority:
                raise RequestError(
                    422,
                    f"task {task!r} is of kind {model.kind_of(task)}, which does not order texts; "
                    "reranking needs one that scores pairs, such as ranking or matching",
                )
            return model, task
        wanted = [self.named(name)] if name else list(self.models.values())
        able = [
            (each.rerank_priority, model, task)
            for model in wanted
            for task, each in model.tasks.items()
            if each.rerank_priority > 1
        ]
        if able:
            _, model, task = max(able, key=lambda each: each[0])  # of equal ones the first
            return model, task
        raise RequestError(
            404,
            f"no head that scores pairs in {', '.join(x.name for x in wanted)}: train a ranking or "
            'matching task, or compare vectors with "use": "vectors"',
        )


def open_set(served: Served, tell: Callable[[str], None] = lambda line: None) -> ModelSet:
    """Open everything. Raises UserError."""
    opened: dict[str, ServedModel] = {}
    for name, path in served.models.items():
        opened[name] = open_served(path, name, served.options)
        _warm_up(opened[name])
        tell(_described(opened[name]))
    index, by = None, ""
    if served.index is not None:
        index = _open_index(served.index, served)
        by = _embedding_model(index, opened, served.index)
        index.open_graph()
        index.grow_in_background()
        tell(f"search: {counted(index.total, 'text')} of {served.index}, embedded by {by}")
        if index.wants_graph and not available():
            tell("search compares every vector; pip install 'palm_ds[search]' is faster")
    gc.collect()
    return ModelSet(models=opened, index=index, index_model=by)


def _open_index(path: Path, served: Served) -> SearchIndex:
    """An index, or the vectors of `palm-ds embed` with their texts. Raises UserError."""
    if not path.is_dir():
        return open_embedded(path, served.texts, served.column)
    if not is_index(path):
        raise UserError(f"--index: {path}: not an index; `palm-ds index build` makes one")
    if served.texts or served.column:
        raise UserError(f"--texts: {path} has its texts; leave out --texts and --column")
    return open_index(path)


def _warm_up(model: ServedModel) -> None:
    """Compute once on each device, so that the first request is not the slowest."""
    work = embed_work(model, ["warm up"], model.embedder.settings)
    for device in range(len(model.devices)):
        compute(model, device, [(work, 0)])


def _embedding_model(index: SearchIndex, models: Mapping[str, ServedModel], file: Path) -> str:
    """The model that made an index: of those that give such vectors the first, that of its path
    before others, that embeds its texts to them. Raises UserError if none does."""
    size, embedding = index.size, index.embedding
    made = Path(embedding.model).absolute()
    able = [
        model
        for model in models.values()
        if replace(model.embedder, settings=embedding.settings).size == size
        and embedding.settings.pooling in model.poolings
    ]
    if not able:
        raise UserError(
            f"--index: {file}: vectors of {size} numbers by {embedding.model}; no model served "
            "here gives such vectors"
        )
    able.sort(key=lambda model: model.path.absolute() != made)
    cosines = {model.name: _likeness(index, model) for model in able}
    for name, cosine in cosines.items():
        if made_by(cosine):
            return name
    name, cosine = next(iter(cosines.items()))
    raise UserError(
        f"--index: {file}: not the vectors that {name} gives for these texts (a cosine of "
        f"{cosine:.2f}): it has {embedding.model}'s for its own; embed these again, or "
        "serve that model"
    )


def _likeness(index: SearchIndex, model: ServedModel) -> float:
    """The lowest cosine between vectors of an index and those of a model, for some of its texts."""
    texts, vectors = index.samples()
    if not texts:
        return likeness(vectors, vectors)
    work = embed_work(model, texts, index.embedding.settings)
    scores = compute(model, 0, [(work, number) for number in range(len(texts))])
    return likeness(work.finish(scores)[0], vectors)


def _described(model: ServedModel) -> str:
    """Describe what a model can do, in one line."""
    can = [*model.tasks, *(["fill-mask"] if model.filler else [])]
    how = f"{model.embedder.settings.pooling} of {model.embedder.size} numbers"
    return f"{model.name}: {', '.join([*can, f'embeddings ({how})'])}"
