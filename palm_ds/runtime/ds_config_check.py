"""What DeepSpeed says of a configuration, before any run: which names it knows, what it refuses.

    ask(config, sections) -> Answer(asked={"zero_optimization", "fp16", ...}, problem="")

DeepSpeed takes a mapping and asks it for what it knows; a mapping that remembers what it was asked
for therefore knows DeepSpeed's own vocabulary, whatever its version. The schema is written nowhere
else.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import suggest

if TYPE_CHECKING:
    from pydantic import ValidationError


@dataclass(frozen=True, kw_only=True)
class ConfigVerdict:
    """The top-level names DeepSpeed asks for, and its first complaint, if any."""

    keys_read: set[str]
    problem: str = ""
    named: bool = True
    """The problem says which key it is about."""


def validate_with_deepspeed(
    config: Mapping[str, Any], sections: Mapping[str, Any]
) -> ConfigVerdict:
    """Let DeepSpeed read a whole configuration; `sections` are those a person wrote."""
    quieten()
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    recorder = _Recorder(config)
    try:
        DeepSpeedConfig(recorder)
    except ValidationError as error:
        return ConfigVerdict(keys_read=recorder.asked, problem=_first(error, sections))
    except DeepSpeedConfigError as error:
        return ConfigVerdict(keys_read=recorder.asked, problem=reason(error))
    except (AssertionError, ValueError, TypeError, AttributeError) as error:
        problem = f"DeepSpeed cannot read it ({reason(error)})"
        return ConfigVerdict(keys_read=recorder.asked, problem=problem, named=False)
    return ConfigVerdict(keys_read=recorder.asked)


def processes_now() -> int:
    """How many processes the run has, where it has begun; else 1."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


class _Recorder(dict[str, Any]):
    """A mapping that remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> _Recorder:  # type: ignore[override]  # DeepSpeed writes `x in config.keys()`
        return self

    def __copy__(self) -> _Recorder:  # DeepSpeed reads from a copy
        return self


def _first(error: ValidationError, sections: Mapping[str, Any]) -> str:
    """The first of pydantic's complaints, with the section DeepSpeed's model stands for."""
    detail = error.errors()[0]
    location = [str(part) for part in detail["loc"]]
    name = ".".join([*_section_of(location, sections), *location])
    if detail["type"] == "extra_forbidden":
        near = suggest(location[-1], _fields_of(error.title)) if len(location) == 1 else ""
        return f"{name}: unknown key{near}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{name}: {message[0].lower() + message[1:]}, got {shorten(detail.get('input'))}"


def _section_of(location: list[str], sections: Mapping[str, Any]) -> list[str]:
    holders = [k for k, v in sections.items() if isinstance(v, Mapping) and location[0] in v]
    return holders[:1]


def _fields_of(model: str) -> list[str]:
    """Names of the fields of one of DeepSpeed's configuration models."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = {cls.__name__: cls for cls in DeepSpeedConfigModel.__subclasses__()}
    return list(models[model].model_fields) if model in models else []


def quieten() -> None:
    """Let DeepSpeed speak of warnings and errors only, on rank 0 only. To be called before it is
    imported: it has something to say even then."""
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(known, _Quiet) for known in logger.filters):
        logger.addFilter(_Quiet())
    for module in (r"deepspeed\.", r"torch\.distributed\."):  # DeepSpeed's calls, not ours
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


class _Quiet(logging.Filter):
    """Errors always, warnings on rank 0; but not that a machine without a GPU has none, nor that
    our optimizer is ours."""

    _KNOWN = (
        "Setting accelerator to CPU",
        "**** You are using ZeRO with an untested optimizer",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        first = os.environ.get("RANK", "0") == "0"
        return (
            first
            and record.levelno >= logging.WARNING
            and not record.getMessage().startswith(self._KNOWN)
        )


def reason(error: Exception) -> str:
    """One line of an exception."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__
