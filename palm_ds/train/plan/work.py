"""Parts of a model and a step, as far as a plan depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.encoder.flops import (
    FORWARD,
    filled_tokens,
    first_pass,
    has_labels,
    head_flops,
    pairs_within,
    sequence_sums,
)
from palm_ds.model.heads.heads import predicts_tokens
from palm_ds.model.heads.replaced_tokens import generator_name
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model


@dataclass(frozen=True, kw_only=True)
class TeacherSize:
    """A teacher, which is not trained."""

    config: EncoderConfig
    parameters: int
    precision: str
    shard: bool
    """Whether the processes share its weights out."""

    def bytes(self, world: int) -> float:
        """Of its weights in one of `world` processes."""
        size = 4 if self.precision == "fp32" else 2
        return size * self.parameters / (world if self.shard else 1)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model's shape and its parameters."""

    config: EncoderConfig
    parameters: int
    trained: int
    """Those that are not frozen."""
    largest: int
    """Of the largest parameter."""
    largest_layer: int
    """Of the largest encoder layer."""
    teachers: tuple[TeacherSize, ...] = ()
    generator: EncoderConfig | None = None
    """A second encoder that is trained, on the same rows; its parameters are among those above."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one step, over all processes."""

    rows: int
    length: int
    tokens: float
    """Without padding."""
    squares: float
    """The sum of the squared lengths of the sequences."""
    near: Mapping[int, float] = field(default_factory=dict)
    """{window of attention: pairs of tokens of a sequence that are at most so far apart}; without
    an entry all pairs count."""
    labels: float
    """Tokens that go through the masked-LM head."""
    generated: float = 0.0
    """Those that go through the generator's."""
    filled: float = 0.0
    """Placeholders that a first pass over the rows fills in."""
    read_before: float = 0.0
    """The share of the rows that it reads."""

    def of_model(self, model: ModelSize) -> float:
        """`flops` of the encoder and of a generator."""
        if model.generator is None:
            return self.flops(model.config)
        made = replace(self, labels=self.generated, filled=0.0, read_before=0.0)
        return self.flops(model.config) + made.flops(model.generator)

    def of_rows(self, rows: int) -> StepWork:
        """That of a step with another number of such rows."""
        scale = rows / self.rows
        return replace(
            self,
            rows=rows,
            tokens=self.tokens * scale,
            squares=self.squares * scale,
            near={window: pairs * scale for window, pairs in self.near.items()},
            labels=self.labels * scale,
            generated=self.generated * scale,
            filled=self.filled * scale,
        )

    def flops(self, config: EncoderConfig) -> float:
        """Forward and backward, nothing counted twice; as in the log. Forward is a third."""
        flops = encoder_class(config).flops(config)
        layers = flops.token * self.tokens
        for window, pair in flops.pairs.items():
            pairs = self.squares if window is None else self.near.get(window, self.squares)
            layers += pair * pairs
        labels = self.labels + self.filled * FORWARD
        return layers * first_pass(self.read_before) + head_flops(config) * labels


def size_of(model: Model) -> ModelSize:
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.backbone.layers]
    sizes = [parameter.numel() for parameter in model.parameters()]
    return ModelSize(
        config=model.backbone.config,
        parameters=sum(sizes),
        trained=sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
        largest=max(sizes),
        largest_layer=max(layers, default=0),
        generator=next((generator.encoder.config for generator in model.generators.values()), None),
    )


def vocab_tasks(model: Model) -> list[str]:
    """The losses of heads that predict tokens."""
    return [name for name, head in model.labeled.items() if predicts_tokens(head)]


def generated_labels(model: Model) -> list[str]:
    """The names of the labels that go through a generator's vocabulary."""
    return [generator_name(x) for x, head in model.head_of.items() if head in model.generators]


def sparse_tasks(model: Model) -> list[str]:
    """The losses of heads that read all tokens of a text as words of the vocabulary."""
    return [name for name, head in model.labeled.items() if getattr(head, "sparse", False)]


def encoder_passes(model: Model) -> list[tuple[EncoderConfig, list[str], list[str]]]:
    """Each encoder of the model, with the losses whose labels go through its vocabulary, and those
    whose texts do."""
    generators = [generator.encoder.config for generator in model.generators.values()]
    own = (model.backbone.config, vocab_tasks(model), sparse_tasks(model))
    return [own, *((config, generated_labels(model), list[str]()) for config in generators)]


def work_of(model: Model, batches: Iterable[Batch], rows: int) -> StepWork:
    """The work of a step from (some of) its batches, as if all its `rows` were like them."""
    tokens = squares = labels = generated = filled = read_before = 0.0
    tasks, sparse, length, seen = vocab_tasks(model), sparse_tasks(model), 0, 0
    pairs = model.backbone.flops(model.backbone.config).pairs
    near = {window: 0.0 for window in pairs if window is not None}
    for batch in batches:
        sums = sequence_sums(batch)
        tokens, squares = tokens + float(sums[0]), squares + float(sums[1])
        labels += sum(batch.count(task) for task in tasks if task in batch.labels)
        labels += float(sums[0]) * has_labels(batch, sparse)
        generated += sum(map(batch.count, generated_labels(model)))
        placeholders = filled_tokens(batch, tasks)
        filled += placeholders
        read_before += len(batch.input_ids) * (placeholders > 0)
        seen, length = seen + len(batch.input_ids), batch.input_ids.shape[1]
        for window in near:
            near[window] += float(pairs_within(batch, window))
    work = StepWork(
        rows=seen,
        length=length,
        tokens=tokens,
        squares=squares,
        near=near,
        labels=labels,
        generated=generated,
        filled=filled,
        read_before=read_before / max(seen, 1),
    )
    return work.of_rows(rows)
