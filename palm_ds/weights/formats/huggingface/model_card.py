"""Writes the README.md of a converted model: its origin, what was done, how it was checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from palm_ds.common.printable import printable
from palm_ds.weights.formats.huggingface.plan import ExportPlan

_PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
_AUTO = {
    "ForPreTraining": "AutoModelForPreTraining",
    "Model": "AutoModel",
}


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
    licence: str = ""
    """The source's licence, as stated in its README."""
    documents: tuple[str, ...] = ()
    """The source's licence and README, saved next to the card."""


def model_card(plan: ExportPlan, made: Provenance) -> str:
    """The text of README.md."""
    ending = next((x for x in _PIPELINES if plan.architecture.endswith(x)), "Model")
    head = ["---", "library_name: transformers"]
    head += [f"pipeline_tag: {_PIPELINES[ending]}"] if ending in _PIPELINES else []
    head += [f"license: {made.licence}"] if made.licence else []
    sections = [
        "\n".join([*head, "---"]),
        f"# {plan.architecture}",
        _origin(plan, made),
        f"```python\n{_example(plan, ending)}\n```",
        *_section("Documents of the source", map(_code, made.documents)),
        *_section("Note", (f"- {printable(note)}" for note in made.notes)),
        "## How it was checked\n\n" + _checked(made),
        *_section("Created (not in the source)", _rows(plan.created)),
        *_section("Skipped", _rows({**made.skipped, **plan.skipped})),
        *_section("Mapped", _mapped(plan)),
    ]
    return "\n\n".join(sections) + "\n"


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


def _example(plan: ExportPlan, ending: str) -> str:
    name = _AUTO.get(ending) or plan.architecture
    if ending in ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"):
        name = f"AutoModel{ending}"
    return f'from transformers import {name}\n\nmodel = {name}.from_pretrained("this folder")'


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
