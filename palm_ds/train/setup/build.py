"""Builds the stream, the held-out set and the model of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key
from palm_ds.data.reader.minimal_pairs import read_paradigms
from palm_ds.data.stream.document_stream import DocumentStream
from palm_ds.data.stream.example_stream import ExampleStream
from palm_ds.data.stream.packed_stream import PackedStream
from palm_ds.data.stream.row_stream import Mixtures
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.stream.windows import DocumentDataset
from palm_ds.data.tasks.soft_labels import SoftTasks
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import (
    Encoder,
    Pooler,
    build_encoder,
    encoder_class,
    has_windows,
    init_weights,
    memory_shape,
)
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import TextPooling
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.device.torch_settings import DTYPES
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokens import SpecialTokens
from palm_ds.train.evaluate.documents import held_out_documents
from palm_ds.train.evaluate.evaluate import HeldOutSet, held_out_set
from palm_ds.train.evaluate.minimal_pairs import PairSet, pair_set
from palm_ds.train.evaluate.probe import Probe, open_probe
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.sources import Data, datasets_of

log = logging.getLogger(__name__)

AnyStream: TypeAlias = PackedStream | ExampleStream | DocumentStream


def build_stream(
    recipe: Recipe,
    data: Data,
    round_up_rows: Callable[[int], int] = lambda rows: rows,
    soft: SoftTasks = MappingProxyType({}),
) -> AnyStream:
    """The training rows of a recipe. With a batch in examples, `round_up_rows` rounds the rows of
    the largest step up to what processes and micro-batches divide. `soft`: the tasks that a teacher
    labels."""
    if recipe.examples:
        datasets, mixtures = datasets_of(
            recipe, recipe.curriculum.task_groups, data.train, seed=recipe.seed, soft=soft
        )
        stream = ExampleStream(
            curriculum=recipe.curriculum,
            datasets=datasets,
            mixtures=mixtures,
            examples={
                task_group: recipe.examples_of(task_group)
                for task_group in recipe.curriculum.task_groups
            },
            length=recipe.length,
            seed=recipe.seed,
            pad=data.vocabulary.pad,
            mask_rates=recipe.stage_plan.mask_rates,
        )
        stream.rows = round_up_rows(stream.most_rows())
        return stream
    datasets, of_stages = _datasets_of_stages(recipe, data, soft)
    kind: Any = DocumentStream if recipe.documents_read else PackedStream
    return kind(
        curriculum=recipe.curriculum,
        datasets=datasets,
        mixtures=of_stages,
        sizes=recipe.stage_plan.sizes,
        seed=recipe.seed,
        pad=data.vocabulary.pad,
        mask_rates=recipe.stage_plan.mask_rates,
    )


def _datasets_of_stages(
    recipe: Recipe, data: Data, soft: SoftTasks
) -> tuple[list[TaskGroupDataset], list[Mixtures]]:
    """The datasets of every length of rows, and the mixtures of every stage. Those of a length of a
    stage's own have it in their names: they have other examples, in another order."""
    datasets: list[TaskGroupDataset] = []
    of_length: dict[int, Mixtures] = {}
    for length in dict.fromkeys([size.length for size in recipe.stage_plan.sizes]):
        sizes = zip(recipe.curriculum.stages, recipe.stage_plan.sizes, strict=True)
        stages = [stage for stage, size in sizes if size.length == length]
        groups = dict.fromkeys(b for stage in stages for b, _ in stage.steps_of)
        of_stage, mixtures = datasets_of(
            recipe, [*groups], data.train, seed=recipe.seed, soft=soft, length=length
        )
        of_length[length] = {
            task_group: [(len(datasets) + number, share) for number, share in pairs]
            for task_group, pairs in mixtures.items()
        }
        if length != recipe.length:
            of_stage = [replace(x, name=f"{x.name} in rows of {length}") for x in of_stage]
        datasets += of_stage
    settings = zip(recipe.stage_plan.settings, recipe.stage_plan.sizes, strict=True)
    mixtures = [
        mixed(recipe, of_length[size.length], own.mixture or {}, datasets) for own, size in settings
    ]
    return datasets, mixtures


def mixed(
    recipe: Recipe,
    mixtures: Mixtures,
    own: Mapping[str, Mapping[str, float]],
    datasets: Sequence[TaskGroupDataset],
) -> Mixtures:
    """The mixtures with a stage's own weights, {source: {corpus: weight}}, where it has any."""
    stage: dict[str, Sequence[tuple[int, float]]] = {}
    for task_group, pairs in mixtures.items():
        source = datasets[pairs[0][0]].tasks[0].source
        if weights := own.get(source):
            given = [weights.get(corpus, 0.0) for corpus in recipe.sources[source].weights]
            numbers = [number for number, _ in pairs]
            stage[task_group] = [
                (number, weight / sum(given))
                for number, weight in zip(numbers, given, strict=True)
                if weight
            ]
        else:
            stage[task_group] = [*pairs]
    return stage


def build_held_out(recipe: Recipe, data: Data) -> HeldOutSet:
    """The held-out rows of a recipe; independent of its seed."""
    datasets, _ = datasets_of(
        recipe, recipe.curriculum.task_groups, data.held_out, seed=0, fixed=True
    )
    examples = recipe.evaluate.of_corpus
    datasets = [
        dataset
        for dataset in datasets
        if len(dataset.source) and (examples or dataset.tasks[0].reads == "table")
    ]
    for dataset in datasets:
        _check_held_out(recipe, data, dataset)
    rows = _held_out_set(recipe, datasets, examples, data.vocabulary.pad)
    rate = recipe.evaluate.mask_rate
    return replace(rows, sets=_evaluation_sets(recipe, data), mask_rate=rate)


def build_pairs(recipe: Recipe, model: Model, tokenizer: Tokenizer) -> PairSet | None:
    """The minimal pairs of `evaluate.pairs`, for the task that is exported if it predicts tokens,
    else the first that does; None if there are none. Raises UserError."""
    settings = recipe.evaluate
    if not settings.pairs:
        return None
    # A head that writes texts is another class.
    tasks = [t for t, h in model.head_of.items() if type(model.heads[h]) is MaskedLMHead]
    if not tasks:
        raise UserError("evaluate.pairs: no task predicts masked tokens; add knowledge_masking")
    exported = default_task(recipe, model)
    task = exported if exported in tasks else tasks[0]
    try:
        return pair_set(
            read_paradigms(settings.pairs),
            tokenizer,
            task=task,
            task_id=recipe.task_ids[task],
            most=min(recipe.length, model.backbone.config.max_length),
            score=settings.pair_score,
            reading=recipe.built_tasks[task].head_outputs().reading,
        )
    except UserError as error:
        raise UserError(f"evaluate.pairs: {error}") from None


def build_probe(recipe: Recipe, model: Model, tokenizer: Tokenizer) -> Probe | None:
    """The rows of `evaluate.probe`, with the task embedding of texts that name no task; None if
    there are none. Raises UserError."""
    settings, task = recipe.evaluate.probe, default_task(recipe, model)
    if settings is None:
        return None
    config = model.backbone.config
    try:
        return open_probe(
            settings,
            tokenizer,
            task=task,
            task_id=recipe.task_ids[task],
            length=min(recipe.length, config.max_length),
            segments=config.token_types,
        )
    except UserError as error:
        raise UserError(f"evaluate.probe: {error}") from None


def _evaluation_sets(recipe: Recipe, data: Data) -> dict[str, HeldOutSet]:
    """The rows of each further evaluation set, for tasks whose source has one."""
    sets = {}
    for name, side in data.evaluation_sets.items():
        tasks = recipe.built_tasks
        task_groups = [
            b for b in recipe.curriculum.task_groups if tasks[tasks_of(b)[0]].source in side
        ]
        datasets, _ = datasets_of(recipe, task_groups, side, seed=0, fixed=True)
        sets[name] = _held_out_set(recipe, datasets, 0, data.vocabulary.pad)
    return sets


def _held_out_set(
    recipe: Recipe, datasets: Sequence[TaskGroupDataset], examples: int, pad: int
) -> HeldOutSet:
    documents = [dataset for dataset in datasets if isinstance(dataset, DocumentDataset)]
    if documents:
        shape = memory_shape(recipe.backbone_config)
        return held_out_documents(documents, examples, recipe.length, pad, shape)
    return held_out_set(datasets, examples, recipe.length, pad)


def _check_held_out(recipe: Recipe, data: Data, dataset: TaskGroupDataset) -> None:
    """Raises UserError that names `held_out` if it leaves a task too little to read."""
    name = dataset.tasks[0].source
    try:
        dataset.order.up_to(1)
    except UserError as error:
        if recipe.sources[name].validation or recipe.sources[name].folds:
            raise
        group = " + ".join(task.name for task in dataset.tasks)
        _check_training(recipe, data, group)  # with nothing there, no share helps
        held = sum(len(source) for _, source, _ in data.held_out[name])
        count = held + sum(len(source) for _, source, _ in data.train[name])
        of = "rows" if recipe.sources[name].table else "documents"
        raise UserError(
            f"held_out: {recipe.held_out:g} of {count} {of} of sources.{name} holds out {held}, "
            f"too few to evaluate on ({error}); increase it, or give sources.{name}.validation"
        ) from None


def _check_training(recipe: Recipe, data: Data, task_group: str) -> None:
    """Raises UserError if the training data has no example of a task group."""
    datasets, _ = datasets_of(recipe, [task_group], data.train, seed=recipe.seed)
    for dataset in datasets:
        dataset.order.up_to(1)


def build_model(
    recipe: Recipe,
    ds_config: DSConfig,
    vocabulary: SpecialTokens,
    *,
    device: torch.device,
    training: bool = False,
    level: int = logging.DEBUG,
    encoder: EncoderConfig | None = None,
) -> Model:
    """Encoder and heads with initial weights; those of the encoder and of each head depend only on
    the seed and its name. The chosen kernels, with reasons, are logged at `level`. Only `training`
    is worth compiling for: predictions have rows of any length. `encoder`: of stored weights, where
    a stage may have other rotary bases than the recipe."""
    config = full_config(encoder or recipe.backbone_config, vocabulary)
    kernels, lines = choose_kernels(
        ds_config.kernels,
        device=device,
        dtype=DTYPES[ds_config.precision],
        config=config,
        zero_stage=ds_config.stage,
        fixed_shapes=training and _fixed_shapes(recipe),
        partial_tasks=[n for n, task in recipe.built_tasks.items() if task.attends_partially],
        windows=has_windows(config),
        score_biases=encoder_class(config).adds_to_scores(config),
        memories=encoder_class(config).memory_length(config) > 0,
        states_read=bool(training and recipe.teacher and recipe.teacher.weights),
    )
    for line in lines:
        log.log(level, "%s", line)
    torch.manual_seed(derive_key(recipe.seed, "backbone") >> 1)
    try:
        backbone = build_encoder(config, kernels, recompute=ds_config.activation_checkpointing)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        sizes = f"hidden_size {config.hidden_size:,}, num_layers {config.num_layers:,}"
        raise UserError(f"backbone: {sizes}: does not fit into memory") from None
    if all(task.reads == "table" for task in recipe.built_tasks.values()):
        _init_pooler(backbone, recipe.seed)
    heads: dict[str, nn.Module] = {}
    head_of = {name: task.share or name for name, task in recipe.built_tasks.items()}
    owners = [(name, task) for name, task in recipe.built_tasks.items() if not task.share]
    for name, task in sorted(owners, key=lambda each: not each[1].changes_encoder):
        torch.manual_seed(derive_key(recipe.seed, "head", name) >> 1)
        heads[name] = task.head(backbone)
    temperatures = {name: task.pseudo_tokens for name, task in recipe.built_tasks.items()}
    pseudo = {name: each for name, each in temperatures.items() if each is not None}
    return Model(backbone, heads, head_of, pseudo)


def _fixed_shapes(recipe: Recipe) -> bool:
    """Whether rows have one length, so that layers are worth compiling."""
    return any(task.reads != "table" for task in recipe.built_tasks.values())


def _init_pooler(backbone: Encoder, seed: int) -> None:
    """Initialize the pooler for fine-tuning, for checkpoints without one: like transformers, and
    like new heads (`init_weights`). A custom encoder's own pooler keeps its weights."""
    if type(backbone.pooler) is Pooler:
        torch.manual_seed(derive_key(seed, "pooler") >> 1)
        init_weights(backbone.pooler, backbone.config.init_range, truncated=False)


def full_config(config: EncoderConfig, vocabulary: SpecialTokens) -> EncoderConfig:
    """The encoder config with the vocabulary size filled in."""
    size = config.vocab_size or vocabulary.size
    if size < vocabulary.size:
        raise UserError(
            f"backbone.vocab_size: {size} rows, but the corpus's tokenizer has {vocabulary.size}"
        )
    return replace(config, vocab_size=size, pad=vocabulary.pad)


def outputs_of(recipe: Recipe, model: Model) -> dict[str, HeadOutputs]:
    """{head: the meaning of its scores}, as given by the task that owns it; of a masked-LM head, by
    the one that trained it last."""
    tasks = recipe.built_tasks
    owners = {name: name for name in model.heads if name in tasks}
    for name in owners:
        if isinstance(model.heads[name], MaskedLMHead):
            owners[name] = _last_trained(recipe, model, name)
    outputs = {name: tasks[owner].head_outputs() for name, owner in owners.items()}
    beside = {name: getattr(head, "matches_images", False) for name, head in model.heads.items()}
    return {name: replace(each, images=beside[name]) for name, each in outputs.items()}


def default_task(recipe: Recipe, model: Model) -> str:
    """The task whose row of the task embedding is used for texts that name none: `export_task`,
    else the task that trains vectors of texts, the first masked-word task (of those that share its
    head, the one that trained it last), or the first one."""
    words = [t for t, h in model.head_of.items() if isinstance(model.heads[h], MaskedLMHead)]
    taken = pooling_taken(recipe)
    words = [_last_trained(recipe, model, model.head_of[word]) for word in words[:1]]
    usual = [taken[0]] if taken else words or list(recipe.task_ids)
    return recipe.export_task or next(iter(usual), "")


def _last_trained(recipe: Recipe, model: Model, head: str) -> str:
    """The task of the last stage that trains a head; of several there its owner, or the first."""
    users = [task for task, own in model.head_of.items() if own == head]
    users.sort(key=lambda task: task != head)
    for stage in reversed(recipe.curriculum.stages) if len(users) > 1 else ():
        trained = {task for group, _ in stage.steps_of for task in tasks_of(group)}
        if trained_tasks := [task for task in users if task in trained]:
            return trained_tasks[0]
    return users[0]


def pooling_taken(recipe: Recipe) -> tuple[str, TextPooling] | None:
    """The task that trains vectors of texts, and how texts become them: `export_task` if it does,
    else the last such task. None if no task does."""
    poolings = {name: task.text_pooling() for name, task in recipe.built_tasks.items()}
    trained = {name: pooling for name, pooling in poolings.items() if pooling is not None}
    if not trained:
        return None
    name = recipe.export_task if recipe.export_task in trained else list(trained)[-1]
    return name, trained[name]


def text_pooling(recipe: Recipe) -> TextPooling | None:
    """Pooling of texts into vectors, if a task trains that."""
    taken = pooling_taken(recipe)
    return taken[1] if taken else None
