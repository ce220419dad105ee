"""Settings for learning from a teacher: the section `teacher` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.model.distillation.losses import SoftMeasure

RELATIONS = {"q": 0, "k": 1, "v": 2}
"""Which third of a layer's queries, keys and values a letter is."""
_MAX_TEMPERATURE = 100  # beyond it, divergences in fp32 are rounding errors


@dataclass(frozen=True, kw_only=True)
class LogitsSettings(Settings):
    """Scores of heads: soft labels of texts, words, or masked tokens over the vocabulary."""

    weight: NonNegativeFloat = 1.0
    """Weight of the loss of each task; that of its labels is the task's own `weight`, and 0 if only
    the teacher counts."""
    tasks: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """{task: weight}, instead of `weight`, for these tasks only. Empty: all tasks that the teacher
    has a head for."""
    temperature: Annotated[float, Field(gt=0, le=_MAX_TEMPERATURE)] = 1.0
    """Divides the scores of both, so that classes the teacher finds unlikely count more. The loss
    is multiplied by its square."""
    loss: SoftMeasure = "kl"
    """kl: Kullback-Leibler divergence; mse: squared error of the scores; hard: cross-entropy with
    the teacher's best class, as if it were the label."""
    top_k: NonNegativeInt = 0
    """For masked words: only the teacher's k most likely tokens, with their probabilities scaled to
    add up to 1; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "hard" and self.temperature != 1:
            raise UserError("temperature: has no effect with `loss: hard`; leave it out")
        if self.top_k and self.loss == "mse":
            raise UserError("top_k: needs `loss: kl`, since the other tokens have no scores")


@dataclass(frozen=True, kw_only=True)
class HiddenStatesSettings(Settings):
    """Vectors of all tokens after some layers (TinyBERT's L_hidn)."""

    weight: NonNegativeFloat = 1.0
    """Weight of the loss, the mean over the layers."""
    layers: dict[int, int] = field(default_factory=dict)
    """{layer of the student: layer of the teacher}, counted from 1. Empty: all of the student's,
    evenly spaced over the teacher's, the last to the last."""
    loss: Literal["mse", "cosine"] = "mse"
    """mse: mean squared difference; cosine: 1 - cosine. If the widths differ, a linear map of the
    student's vectors is trained too."""


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(Settings):
    """Attention scores before the softmax (TinyBERT's L_attn)."""

    weight: NonNegativeFloat = 1.0
    """Weight of the loss, the mean over layers and heads."""
    layers: dict[int, int] = field(default_factory=dict)
    """As in `hidden_states`."""


@dataclass(frozen=True, kw_only=True)
class RelationsSettings(Settings):
    """Relations among the queries, keys or values of a text (MiniLM, MiniLMv2), for any widths."""

    weight: NonNegativeFloat = 1.0
    """Weight of the loss, the sum over `pairs` of the mean over layers and heads."""
    layers: dict[int, int] = field(default_factory=dict)
    """As in `hidden_states`. Empty: the last one to the last one."""
    pairs: tuple[str, ...] = ("qq", "kk", "vv")
    """MiniLMv2: qq, kk and vv; MiniLM: qk (attention) and vv."""
    heads: NonNegativeInt = 0
    """Number of relation heads; both widths must be multiples of it. 0: the teacher's number of
    attention heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for pair in self.pairs:
            if len(pair) != 2 or not set(pair) <= set(RELATIONS):
                raise UserError(f"pairs: {pair!r}; expected two letters of q, k and v, such as qq")
        if not self.pairs:
            raise UserError("pairs: empty; name at least one, such as qq")


@dataclass(frozen=True, kw_only=True)
class EmbeddingsSettings(Settings):
    """The embeddings that enter the first layer (TinyBERT's L_embd)."""

    weight: NonNegativeFloat = 1.0
    """Weight of the loss."""
    loss: Literal["mse", "cosine"] = "mse"
    """As in `hidden_states`."""


@dataclass(frozen=True, kw_only=True)
class TeacherModelSettings(Settings):
    """One of several teachers."""

    path: str
    """A run, or a folder of weights in any format."""
    weight: PositiveFloat = 1.0
    """Its share of the mean over the teachers of a task."""
    tasks: tuple[str, ...] = ()
    """The tasks it teaches. Empty: all it has a head for."""
    heads: dict[str, str] = field(default_factory=dict)
    """{task: its head}, where the names differ."""


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(Settings):
    """Distillation: train with what larger models make of the same texts. Without any of the
    sections below, `logits`."""

    path: str = ""
    """The teacher: a run, or a folder of weights in any format (docs/distillation.md)."""
    models: dict[str, TeacherModelSettings] = field(default_factory=dict)
    """{name: {path, weight, tasks, heads}}: several teachers, whose scores are averaged."""
    file: str = ""
    """Scores that `palm-ds teach` wrote; the models are then not opened."""
    heads: dict[str, str] = field(default_factory=dict)
    """With `path`: {task: the teacher's head}, where the names differ."""
    states_of: str = ""
    """With `models`: the one whose hidden states, attention and embeddings are learned. Default:
    the first."""
    shard: bool = False
    """Share its weights out among the processes; each layer is gathered while it is computed."""
    precision: Literal["", "fp32", "bf16", "fp16"] = ""
    """Of its weights and its computation. Default: that of the run."""
    logits: LogitsSettings | None = None
    """Learn the scores of its heads."""
    hidden_states: HiddenStatesSettings | None = None
    """Learn the vectors of its layers."""
    attention: AttentionSettings | None = None
    """Learn its attention scores: products of queries and keys, rotary positions among them, but no
    terms of relative positions (DeBERTa, MPNet), between all tokens of a text, whatever a layer's
    window."""
    relations: RelationsSettings | None = None
    """Learn relations of its queries, keys and values."""
    embeddings: EmbeddingsSettings | None = None
    """Learn its embeddings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path and self.models:
            raise UserError("gives path and models; give one of the two")
        if self.heads and self.models:
            raise UserError("heads: are those of `path`; each of `models` has `heads` of its own")
        if not (self.path or self.models or self.file):
            raise UserError("names none; give `path: RUN`, `models: {...}` or `file: SCORES`")
        if self.file and self.weights:
            raise UserError(f"file: has only scores; {next(iter(self.weights))} needs a model")
        if self.states_of and self.states_of not in self.models:
            raise UserError(f"states_of: no {self.states_of!r} in `models`")

    @property
    def all_models(self) -> Mapping[str, TeacherModelSettings]:
        """The teachers by name; the one of `path` is called `teacher`."""
        if self.path:
            return {"teacher": TeacherModelSettings(path=self.path, heads=self.heads)}
        return self.models

    @property
    def soft_labels(self) -> LogitsSettings | None:
        """Settings for learning the scores of heads."""
        return self.logits if self.logits or self.weights else LogitsSettings()

    @property
    def weights(self) -> dict[str, float]:
        """{section: weight} of what is learned of the inside of the encoder."""
        sections = {name: getattr(self, name) for name in STATE_SECTIONS}
        return {name: section.weight for name, section in sections.items() if section}


STATE_SECTIONS = ("hidden_states", "attention", "relations", "embeddings")
