"""The architectures that Hugging Face's programs have too, found by model type or by encoder.

Each is a module of `architectures`, or a class that an encoder of the user's names; model types
whose encoders compute the same are its families.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.plugins import import_class
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import class_of_kind
from palm_ds.model.encoder.encoder import Encoder, encoder_class
from palm_ds.weights.formats.huggingface import architectures
from palm_ds.weights.formats.huggingface.architecture import Architecture, Family


def _shipped() -> Iterator[tuple[str, Architecture]]:
    """The architecture of each module, by the module's name."""
    for module in pkgutil.iter_modules(architectures.__path__):
        path = f"{architectures.__name__}.{module.name}"
        for each in vars(importlib.import_module(path)).values():
            if (
                isinstance(each, type)
                and each.__module__ == path
                and issubclass(each, Architecture)
            ):
                yield module.name, each()


ARCHITECTURES: dict[str, Architecture] = dict(_shipped())
"""By the name of their file, or of the user's class."""
_BY_FAMILY = {name: each for each in ARCHITECTURES.values() for name in each.families}
FAMILIES: dict[str, Family] = {
    name: family for each in ARCHITECTURES.values() for name, family in each.families.items()
}
"""By `model_type`."""
FAMILY_NAMES = f"{', '.join(list(FAMILIES)[:-1])} or {list(FAMILIES)[-1]}"
"""Those that come with palm_ds."""


def _add(name: str, form: Architecture) -> None:
    """Raises UserError if another architecture has one of its families."""
    for family in form.families:
        if family in FAMILIES:
            other = type(_BY_FAMILY[family]).__name__
            raise UserError(f"{name}: {family} is a model type of {other}; choose another name")
    ARCHITECTURES[name] = form
    FAMILIES.update(form.families)
    _BY_FAMILY.update(dict.fromkeys(form.families, form))


def architecture_of(model_type: str) -> Architecture:
    """The architecture of one of FAMILIES."""
    return _BY_FAMILY[model_type]


def architecture_for(config: EncoderConfig) -> Architecture:
    """The architecture of an encoder. Raises UserError if Hugging Face has none."""
    if form := _of_class(encoder_class(config)):
        return form
    raise UserError(f"Hugging Face has no {config.kind} encoder")


def _of_class(encoder: type[Encoder]) -> Architecture | None:
    name = encoder.hf or encoder.paddle
    if "." in name and name not in ARCHITECTURES:
        where = f"{encoder.__name__}.hf"
        form: type[Any] = import_class(name, Architecture, where)
        if missing := sorted(form.__abstractmethods__):
            raise UserError(f"{where}: {name} does not define {', '.join(missing)}")
        _add(name, form())
    return ARCHITECTURES.get(name)


KIND = "palm_ds_kind"
"""The key of config.json that names an encoder of the user's, whose class has the architecture."""


def knows_family(about: Mapping[str, object]) -> bool:
    """Whether a config.json is of one of FAMILIES, or of an encoder of the user's."""
    kind, encoder = about.get("model_type"), about.get(KIND)
    if isinstance(encoder, str):
        _of_class(class_of_kind(encoder, Encoder))
    return isinstance(kind, str) and kind in FAMILIES and not FAMILIES[kind].paddle_only


def family_of(config: EncoderConfig) -> str:
    """The `model_type` of the first family that computes the same; empty if none does."""
    return architecture_for(config).family_of(config)


def served_family(config: EncoderConfig) -> str:
    """Likewise, once the embedding of one task is folded into other embeddings: servers such as
    text-embeddings-inference and vLLM do not know Ernie."""
    return family_of(replace(config, task_types=0))


def family_of_class(name: str) -> str:
    """The model type that a transformers class belongs to; empty if it is none of these."""
    fits = [x for x, family in FAMILIES.items() if name.startswith(family.class_prefix)]
    return max(fits, key=lambda x: len(FAMILIES[x].class_prefix), default="")


def has_class(config: EncoderConfig, ending: str) -> bool:
    """Whether transformers has this class (`ForQuestionAnswering`) for an encoder; empty: any that
    fits a head."""
    form = _of_class(encoder_class(config))
    return not ending or form is None or ending in form.classes


def other_masked_lm(kind: str, config: EncoderConfig) -> str:
    """Reason why a masked-LM head of this encoder cannot be one of this family's."""
    family = FAMILIES[kind]
    if family.without_masked_lm:
        return f"no {family.class_prefix} has a masked-LM head"
    return (
        f"{family.class_prefix}'s masked-LM head always has "
        f"{family.masked_lm_activation or config.activation}, but this one has "
        f"{config.head_activation or config.activation}"
    )
