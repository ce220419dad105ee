"""Writes the README.md of a converted model: its origin, what was done, how it was checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from palm_ds.common.messages import printable
from palm_ds.model.pooling import SPLADE
from palm_ds.weights.formats.huggingface.architecture import CROSS_ENCODER, READING
from palm_ds.weights.formats.huggingface.plan import ExportPlan

_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    CROSS_ENCODER: "text-classification",
    "Model": "feature-extraction",
}
"""{ending of the class: the hub's name for what it does}"""
_SENTENCES = "sentence-similarity"
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HERE = 'MODEL = "."  # this folder, or its name on the hub'
"""The line of a card's example that says where the model is."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The facts of a model card that the export plan does not have."""

    source: str
    """Origin of the weights: a name, a version, a training run. Never a local path."""
    format: str = ""
    """Format of the source."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """{name in the source: why it was skipped}, in addition to the plan's."""
    difference: float | None = None
    """The largest difference of any output, if both sides were run."""
    tolerance: float | None = None
    notes: tuple[str, ...] = ()
    program: str = "palm_ds"
    license: str = ""
    """The source's license, as stated in its README."""
    documents: tuple[str, ...] = ()
    """The source's license and README, saved next to the card."""
    base_model: str = ""
    """The model on the hub that training started from."""
    datasets: tuple[str, ...] = ()
    """Data sets on the hub that it was trained on."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """{task it was trained on: its kind}"""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """{task: {measure: held-out score}}"""
    scored_at: int = 0
    """The step of the scores."""
    pairs: bool = False
    """Its head reads two texts."""


def model_card(plan: ExportPlan, made: Provenance) -> str:
    """The text of README.md."""
    sections = [
        _head(plan, made),
        f"# {plan.architecture}",
        _origin(plan, made),
        f"```python\n{HERE}\n\n{_example(plan, made)}\n```",
        *_section("Trained on", _rows(made.tasks)),
        *_section(f"Held-out scores at step {made.scored_at:,}", _scores(made)),
        *_section("Documents of the source", map(_code, made.documents)),
        *_section("Note", (f"- {printable(note)}" for note in _notes(plan, made))),
        "## How it was checked\n\n" + _checked(made),
        *_section("Created (not in the source)", _rows(plan.created)),
        *_section("Skipped", _rows({**made.skipped, **plan.skipped})),
        *_section("Mapped", _mapped(plan)),
    ]
    return "\n\n".join(sections) + "\n"


def named_example(card: str, name: str) -> str:
    """The card with an example that opens the model of this name on the hub."""
    return card.replace(HERE, f'MODEL = "{name}"')


def _head(plan: ExportPlan, made: Provenance) -> str:
    """The metadata that the hub reads."""
    own = plan.pooling is not None and plan.pooling.trained
    pipeline = _SENTENCES if own else _PIPELINES.get(_ending(plan), "")
    pipeline = "feature-extraction" if _sparse(plan) else pipeline
    pipeline = "" if READING in plan.config_json else pipeline
    pipeline = "text-ranking" if _reranks(plan) else pipeline
    tags = ["palm_ds", *_tags(plan)]
    return "\n".join(
        [
            "---",
            f"library_name: {'sentence-transformers' if own or plan.head else 'transformers'}",
            *([f"pipeline_tag: {pipeline}"] if pipeline else []),
            *([f"license: {made.license}"] if made.license else []),
            *_listed("base_model", [made.base_model] if made.base_model else []),
            *_listed("datasets", made.datasets),
            *_listed("tags", tags),
            "---",
        ]
    )


def _tags(plan: ExportPlan) -> list[str]:
    """Tags for what else reads it: text-embeddings-inference knows neither Ernie nor max
    pooling."""
    if plan.head:
        return ["sentence-transformers", "cross-encoder"]
    if not plan.embeds:
        return []
    if _sparse(plan):
        return ["sentence-transformers", "sparse-encoder", "splade", "feature-extraction"]
    known = plan.config_json["model_type"] != "ernie"
    known = known and (plan.pooling is None or plan.pooling.pooling != "max")
    other = ["text-embeddings-inference"] if known else []
    return ["sentence-transformers", "feature-extraction", *other]


def _sparse(plan: ExportPlan) -> bool:
    """Whether it was trained to give sparse vectors."""
    return plan.pooling is not None and plan.pooling.pooling == SPLADE


def _notes(plan: ExportPlan, made: Provenance) -> tuple[str, ...]:
    reading = plan.config_json.get(READING)
    if reading is None:
        return made.notes
    unmasked = " from the text before it; attention is causal" if reading == "causal" else ""
    return (
        f"Its output at a position predicts the next token{unmasked}: the scores of a masked token "
        "are those at the position before it, which pipelines do not know.",
        *made.notes,
    )


def _listed(key: str, values: Iterable[str]) -> list[str]:
    """A list in YAML; a value is never more than a name."""
    names = [f"- {value}" for value in values if _NAME.fullmatch(value)]
    return [f"{key}:", *names] if names else []


def _ending(plan: ExportPlan) -> str:
    return next((x for x in _ENDINGS if plan.architecture.endswith(x)), "Model")


def _reranks(plan: ExportPlan) -> bool:
    """Whether it gives one score of relevance."""
    about = plan.config_json
    scores = len(about.get("id2label", ())) if _ending(plan) == "ForSequenceClassification" else 0
    return scores == 1 and about.get("problem_type") is None


def _origin(plan: ExportPlan, made: Provenance) -> str:
    kind = f" ({printable(made.format)})" if made.format else ""
    config = plan.config
    return (
        f"Converted by {made.program} from {printable(made.source)}{kind}: {config.num_layers} "
        f"layers, hidden size {config.hidden_size}, {config.num_heads} heads, vocabulary of "
        f"{config.vocab_size}, "
        f"LayerNorm eps {config.layer_norm_eps:g}, {config.activation}; weights in "
        f"{plan.config_json['dtype']}."
    )


def _example(plan: ExportPlan, made: Provenance) -> str:
    ending = _ending(plan)
    shown = "" if READING in plan.config_json else _EXAMPLES.get(ending, "")
    if made.pairs and ending == "ForSequenceClassification":
        shown = _PAIRS
    if plan.head:
        shown = _scoring(plan, made)
    if _reranks(plan):
        shown = _RERANKING
    parts = [shown] if shown else []
    if plan.embeds:
        trained = plan.pooling is not None and plan.pooling.trained
        parts = [_EMBEDDING] if trained or not shown else [shown, _EMBEDDING]
        parts = [_SPARSE] if _sparse(plan) else parts
    return "\n\n".join(parts) or _OPENING.format(name=ending)


def _scoring(plan: ExportPlan, made: Provenance) -> str:
    """With a CrossEncoder, which returns scores before softmax or sigmoid."""
    text = '[("A text.", "Another text.")]' if made.pairs else '"A text."'
    kind = str(plan.config_json.get("problem_type") or "")
    numbers = {"regression": "", "multi_label_classification": ", activation_fn=torch.nn.Sigmoid()"}
    how = numbers.get(kind, ", apply_softmax=True")
    classes = "" if kind == "regression" else ", model.config.id2label"
    imported = "import torch\n" if "torch" in how else ""
    return (
        f"{imported}from sentence_transformers import CrossEncoder\n\n"
        f"model = CrossEncoder(MODEL)\nprint(model.predict({text}{how}){classes})"
    )


def _checked(made: Provenance) -> str:
    if made.difference is None:
        return "The outputs were not compared with those of the source."
    within = f" (allowed: {made.tolerance:g})" if made.tolerance is not None else ""
    return (
        "The source and this model were run on the same inputs; the largest difference of any "
        f"output is {made.difference:.3g}{within}."
    )


def _section(title: str, lines: Iterable[str]) -> list[str]:
    text = "\n".join(lines)
    return [f"## {title}\n\n{text}"] if text else []


def _scores(made: Provenance) -> Iterator[str]:
    for task, values in made.scores.items():
        shown = ", ".join(f"{printable(name)} {value:.4g}" for name, value in values.items())
        yield f"{_code(task)}: {shown}"


def _rows(what: Mapping[str, str]) -> list[str]:
    return [f"{_code(name)}: {printable(why)}" for name, why in what.items()]


def _code(name: str) -> str:
    """An item of a list; a name is never more than a name."""
    plain = printable(name).replace("`", "'")
    return f"- `{plain}`"


def _mapped(plan: ExportPlan) -> list[str]:
    rows = [
        f"| `{hf_name}` | {', '.join(f'`{x}`' for x in ours)} | {how} |"
        for hf_name, (ours, how) in plan.mapped.items()
    ]
    return ["| here | in palm_ds | how |", "| --- | --- | --- |", *rows]


# ---- examples ----

_PIPELINE = """from transformers import pipeline

{name} = pipeline("{task}", model=MODEL)
print({call})"""
_EMBEDDING = """from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer(MODEL).encode(["A text.", "Another text."])
print(vectors.shape)"""
_SPARSE = """from sentence_transformers import SparseEncoder

encoder = SparseEncoder(MODEL)
print(encoder.decode(encoder.encode(["A text."])[0], top_k=10))"""
_OPENING = """from transformers import Auto{name}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(MODEL), Auto{name}.from_pretrained(MODEL)
print(model(**tokenizer("A text.", return_tensors="pt"))[0].shape)"""
_FILL = _PIPELINE.format(
    name="fill",
    task="fill-mask",
    call='fill(f"A {fill.tokenizer.mask_token} text.")[0]["token_str"]',
)
_PAIRS = _PIPELINE.format(
    name="classify",
    task="text-classification",
    call='classify({"text": "A text.", "text_pair": "Another text."}, top_k=None)',
)
_RERANKING = """from sentence_transformers import CrossEncoder

scores = CrossEncoder(MODEL).predict([("A question?", "A text."), ("A question?", "Another text.")])
print(scores)"""
_EXAMPLES = {
    "ForMaskedLM": _FILL,
    "ForPreTraining": _FILL,
    "ForSequenceClassification": _PIPELINE.format(
        name="classify", task="text-classification", call='classify("A text.", top_k=None)'
    ),
    "ForTokenClassification": _PIPELINE.format(
        name="tag", task="token-classification", call='tag("A text.")'
    ),
    "ForQuestionAnswering": """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForQuestionAnswering.from_pretrained(MODEL)
given = tokenizer("Which question?", "The text with the answer.", return_tensors="pt")
scores = model(**given)
first, last = int(scores.start_logits.argmax()), int(scores.end_logits.argmax())
print(tokenizer.decode(given["input_ids"][0][first : last + 1]))""",
    "ForMultipleChoice": """from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForMultipleChoice.from_pretrained(MODEL)
choices = ["One answer.", "Another answer."]
given = tokenizer(["Which question?"] * 2, choices, padding=True, return_tensors="pt")
scores = model(**{name: values[None] for name, values in given.items()}).logits
print(choices[int(scores.argmax())])""",
}
_ENDINGS = ("ForNextSentencePrediction", *_PIPELINES)
