"""Lets DeepSpeed validate a configuration before a run: the keys it knows and its first error.

    ask(config, sections) -> Answer(asked={"zero_optimization", "fp16", ...}, problem="")

DeepSpeed reads the keys it knows from a mapping. A mapping that records which keys were read
therefore yields the keys of the installed version; no other copy of the schema exists. Most
sections are models that refuse unknown keys themselves; those that are read key by key are recorded
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import suggest
from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed

if TYPE_CHECKING:
    from pydantic import ValidationError


@dataclass(frozen=True, kw_only=True)
class ConfigVerdict:
    """The top-level keys that DeepSpeed reads, and its first error, if any."""

    keys_read: set[str]
    defaults: Mapping[str, object]
    """{key that is read with a default: the default}."""
    section_defaults: Mapping[str, Mapping[str, object]]
    """The same of the sections that are read key by key: all of their keys."""
    problem: str = ""
    named: bool = True
    """Whether the problem names the key."""


def validate_with_deepspeed(config: Mapping[str, Any], given: Mapping[str, Any]) -> ConfigVerdict:
    """Let DeepSpeed read a whole configuration; `given` are the sections of the user's file."""
    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    sections = {k: _Recorder(v) for k, v in config.items() if type(v) is dict}
    recorder = _Recorder({**config, **sections})
    problem, named = "", True
    try:
        DeepSpeedConfig(recorder)
    except ValidationError as error:
        problem = _first(error, given)
    except DeepSpeedConfigError as error:
        problem = reason(error)
    except (AssertionError, ArithmeticError, ValueError, TypeError, AttributeError) as error:
        problem, named = f"DeepSpeed cannot read it ({reason(error)})", False
    return ConfigVerdict(
        keys_read={*recorder.defaults, *recorder.looked_for},
        defaults=recorder.defaults,
        section_defaults={name: x.defaults for name, x in sections.items() if x.defaults},
        problem=problem,
        named=named,
    )


def kind_wanted(value: object, default: object) -> str:
    """What is expected instead of a value, as far as a default tells; or nothing. DeepSpeed accepts
    anything, and fails later or does nothing."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return "" if type(value) in (int, float) else "a number"
    return ""


def processes_now() -> int:
    """The number of processes of the run; 1 before it has started."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


class _Recorder(dict[str, Any]):
    """A mapping that records which keys were read or looked for."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.defaults: dict[str, object] = {}
        self.looked_for: set[str] = set()

    def get(self, key: str, default: object = None) -> Any:  # type: ignore[override]
        self.defaults[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.looked_for.add(str(key))
        return super().__contains__(key)

    def keys(self) -> _Recorder:  # type: ignore[override]  # DeepSpeed writes `x in config.keys()`
        return self

    def __copy__(self) -> _Recorder:  # DeepSpeed reads from a copy
        return self


def _first(error: ValidationError, sections: Mapping[str, Any]) -> str:
    """The first of pydantic's errors, with the section that it is about."""
    detail = error.errors()[0]
    location = [str(part) for part in detail["loc"]]
    name = ".".join([*_section_of(location, sections), *location])
    if detail["type"] == "extra_forbidden":
        near = suggest(location[-1], _fields_of(error.title)) if len(location) == 1 else ""
        return f"{name}: unknown key{near}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix(f"{name} ")
    message = f"{message[0].lower() + message[1:]}, got {shorten(detail.get('input'))}"
    return f"{name}: {message}" if name else message


def _section_of(location: list[str], sections: Mapping[str, Any]) -> list[str]:
    """None for values that contradict each other: the message names their section."""
    key = location[0] if location else None
    return [k for k, v in sections.items() if isinstance(v, Mapping) and key in v][:1]


def _fields_of(model: str) -> list[str]:
    """Field names of one of DeepSpeed's configuration models."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = {cls.__name__: cls for cls in DeepSpeedConfigModel.__subclasses__()}
    return list(models[model].model_fields) if model in models else []


def reason(error: Exception) -> str:
    """An exception in one line."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__
