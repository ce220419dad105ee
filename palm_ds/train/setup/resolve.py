"""Fills in what depends on the data: stage lengths in steps, class names from the training rows,
weights of corpora by their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.budgets import DatasetSize
from palm_ds.data.stream.stages import Curriculum
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import Task
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.tasks.shared.image_text import HeadPooling, WholeTextTask
from palm_ds.tasks.shared.text_task import TextTask
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import sampling_weights
from palm_ds.train.recipe.stage_settings import StageSettings
from palm_ds.train.setup.build import full_config, mixed
from palm_ds.train.setup.sources import Data, datasets_of, open_data
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of


def resolve(recipe: Recipe, data: Data | None = None) -> Recipe:
    """Fill in everything that depends on the data: convert stage lengths (tokens, sequences,
    epochs, a sampler) to steps of each task group, infer the class names of tasks from their
    training rows, and weigh corpora by their size (`sampling_exponent`). Returns the recipe
    unchanged if nothing is open. `data`: the recipe's data if they are open already; otherwise they
    are opened if needed."""
    reading = [task for task in recipe.built_tasks.values() if task.reads == "table"]
    spec, sizes = recipe.curriculum_spec, None
    sizes_in: dict[int, dict[str, DatasetSize]] = {}
    by_size = _samples_by_size(recipe)
    if spec.resolved and not reading and not by_size:
        return recipe
    if spec.needs_corpus or reading or by_size:
        data = data if data is not None else open_data(recipe)
        recipe = _with_resolved_tasks(recipe, data)
    if spec.needs_corpus and data is not None:
        sizes, sizes_in = size(recipe, data), _sizes_in_stages(recipe, data)
    curriculum = recipe.stage_plan.resolve(sizes, sizes_in)
    if by_size and data is not None:
        return _with_weights(recipe, curriculum, data)
    return replace(recipe, stages=curriculum.explicit())


def _samples_by_size(recipe: Recipe) -> bool:
    stages = (own.get("sampling_exponent") for own in recipe.curriculum_spec.settings)
    of_stage = any(exponent is not None for exponent in stages)
    return of_stage or any(source.sampling_exponent for source in recipe.sources.values())


def _with_weights(recipe: Recipe, curriculum: Curriculum, data: Data) -> Recipe:
    """With the weights of corpora that follow from their sizes, instead of the exponents."""
    stages = tuple(
        replace(stage, settings=_with_mixture(stage.settings, recipe, data))
        for stage in curriculum.stages
    )
    sources = {
        name: replace(
            source,
            mix=sampling_weights(source.mix, _tokens(data), source.sampling_exponent),
            sampling_exponent=0.0,
        )
        for name, source in recipe.sources.items()
        if source.mix
    }
    stages = Curriculum(stages).explicit()
    return replace(recipe, stages=stages, sources=recipe.sources | sources)


def _tokens(data: Data) -> dict[str, int]:
    """{corpus: its tokens}"""
    return {folder: corpus.manifest.tokens for folder, corpus in data.corpora.items()}


def _with_mixture(settings: Mapping[str, Any], recipe: Recipe, data: Data) -> dict[str, Any]:
    """The settings of a stage with the weights of its own, if it has an exponent or weights."""
    given, exponent = settings.get("mixture") or {}, settings.get("sampling_exponent")
    mixture = {
        name: sampling_weights(
            given.get(name) or source.mix,
            _tokens(data),
            source.sampling_exponent if exponent is None else exponent,
        )
        for name, source in recipe.sources.items()
        if source.mix and (name in given or exponent is not None)
    }
    rest = {k: v for k, v in settings.items() if k not in ("mixture", "sampling_exponent")}
    return rest | ({"mixture": mixture} if mixture else {})


def _with_resolved_tasks(recipe: Recipe, data: Data) -> Recipe:
    values, resolved = dict(recipe.tasks), dict(recipe.built_tasks)
    row = _default_task_row(recipe, data)
    for name in sorted(
        resolved, key=lambda name: bool(resolved[name].share)
    ):  # heads' owners first
        task = resolved[name]
        if task.reads == "corpus":
            continue
        if task.share:
            task = task.with_head_of(resolved[task.share])
        for _, source, _ in data.train[task.source]:
            task = task.resolved(source)
        task = _with_texts(task, [source for _, source, _ in data.train[task.source]])
        if task.task_id < 0:
            own = resolved[task.share].task_id if task.share else row
            task = replace(task, task_id=own)
        if isinstance(task, WholeTextTask) and task.pooling is None:
            task = replace(task, pooling=_head_pooling(task, recipe, data))
        resolved[name] = task
        fields = {k: v for k, v in asdict(task).items() if k != "name"}
        values[name] = {"kind": recipe.tasks[name].get("kind", name)} | fields
    return replace(recipe, tasks=values)


def _with_texts(task: Task, sources: Sequence[TableSource]) -> Task:
    """With the text columns of the training rows, if the recipe names none: rows to predict may
    have other columns."""
    if not isinstance(task, TextTask) or task.texts:
        return task
    if type(task).columns_of is not TextTask.columns_of:
        return task
    columns = {task.columns_of(source) for source in sources}
    return replace(task, texts=columns.pop()) if len(columns) == 1 else task


def _default_task_row(recipe: Recipe, data: Data) -> int:
    """The row of the task embedding for texts of fine-tuning tasks: that of `export_task`."""
    if not recipe.init_from or not recipe.backbone_config.task_types:
        return 0
    return data.start().task_id


def _head_pooling(task: WholeTextTask, recipe: Recipe, data: Data) -> HeadPooling:
    """Of a head whose pooling the recipe does not state: that of the start's head of its name, else
    means if the task prefers them and the start was trained to give them, as vectors of texts or to
    another head. Encoders whose pooler reads more than the first token keep it, and so do runs with
    LoRA, whose adapter/ then has the head."""
    if not recipe.init_from or task.why_no_mean(recipe.backbone_config):
        return "pooler"
    start = data.start()
    heads = {name: head for name, head in start.heads.items() if head.kind == "classes"}
    if task.name in heads and not task.new_head:
        return "mean" if heads[task.name].outputs.averaged else "pooler"
    stated = modules_of(start)
    gives_means = stated.trained and stated.pooling == "mean"
    gives_means = gives_means or any(head.outputs.averaged for head in heads.values())
    usual = task.prefers_means and gives_means and not recipe.lora
    return "mean" if usual and _pools_first_token(recipe, data) else "pooler"


def _pools_first_token(recipe: Recipe, data: Data) -> bool:
    """Whether the encoder's pooler reads the first token alone; of a user's it is not known."""
    if is_custom(recipe.backbone_config.kind):
        return False
    with on_meta():
        backbone = build_encoder(full_config(recipe.backbone_config, data.vocabulary))
    return not backbone.averages_texts


def size(
    recipe: Recipe,
    data: Data,
    task_groups: Sequence[str] = (),
    own: StageSettings | None = None,
) -> dict[str, DatasetSize]:
    """The size of the training data of task groups, by default of all that are trained; independent
    of the seed. `own`: in a stage with these settings."""
    groups, own = task_groups or recipe.curriculum_spec.task_groups, own or StageSettings()
    length = own.length or recipe.length
    datasets, mixtures = datasets_of(recipe, groups, data.train, seed=0, length=length)
    mixtures = mixed(recipe, mixtures, own.mixture or {}, datasets)
    return {
        task_group: _counted(recipe, task_group, [datasets[number] for number, _ in mixture])
        if recipe.examples
        else _measure([(datasets[number], share) for number, share in mixture])
        for task_group, mixture in mixtures.items()
    }


def _sizes_in_stages(recipe: Recipe, data: Data) -> dict[int, dict[str, DatasetSize]]:
    """{number of a stage as written: the sizes there}, where rows of another length have other
    examples, or corpora have other weights."""
    spec = recipe.curriculum_spec
    written = recipe.stage_plan.written if spec.kind == "explicit" else ()
    sizes = {}
    for number, own in enumerate(written):
        mixture = _with_mixture(spec.settings[number], recipe, data).get("mixture")
        if own.length or mixture:
            groups = [b for b, x in spec.budgets[number].items() if x.number]
            sizes[number] = size(recipe, data, groups, replace(own, mixture=mixture))
    return sizes


def _counted(recipe: Recipe, task_group: str, datasets: Sequence[TaskGroupDataset]) -> DatasetSize:
    """With a batch in examples, sizes are counted in steps."""
    items, each = sum(dataset.num_items for dataset in datasets), recipe.examples_of(task_group)
    return DatasetSize(tokens=Fraction(items, each), mean_length=Fraction(1, each))


def _measure(mixture: Sequence[tuple[TaskGroupDataset, float]]) -> DatasetSize:
    """The size of a mixture of datasets, each with its share of the tokens."""
    taken = [(dataset, share, dataset.mean_tokens) for dataset, share in mixture]
    return DatasetSize(
        tokens=float(sum(dataset.num_items * each for dataset, _, each in taken)),
        mean_length=float(1 / sum(Fraction(share) / each for _, share, each in taken)),
    )
