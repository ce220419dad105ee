"""A head that reads means of tokens, which no class of transformers has, as a CrossEncoder of
sentence-transformers.

    modules.json                        Transformer, Pooling, Dense
    2_Dense/                            the head: from `sentence_embedding` to `scores`
    config_sentence_transformers.json   model_type, and that scores are returned as they are
    config.json                         the encoder, and the names of the classes

`CrossEncoder(FOLDER).predict` returns the scores of pairs, or of one text: it takes a list of texts
for a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from palm_ds.common.json_files import write_json
from palm_ds.model.pooling import TextPooling
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.huggingface.architecture import CROSS_ENCODER
from palm_ds.weights.formats.huggingface.sentence_transformers import (
    MODULES,
    SETTINGS,
    kind_of,
    modules_in,
    pooling_of,
    tensors_in,
)
from palm_ds.weights.formats.huggingface.text_pooling import pooling_files
from palm_ds.weights.formats.tensor_files import (
    BIN,
    SAFETENSORS,
    TensorGroup,
    read_json,
    write_file,
)

PARTS = {"weight": "linear.weight", "bias": "linear.bias"}
"""{parameter of the head: its name in the file of the Dense}"""
_DENSE = "2_Dense"
_IDENTITY = "torch.nn.modules.linear.Identity"


def head_in(files: Mapping[str, Path]) -> dict[str, TensorEntry]:
    """{parameter of the head: tensor} of a CrossEncoder as above, of the files that `find_modules`
    returns; empty for anything else."""
    if MODULES not in files or SETTINGS not in files:
        return {}
    modules = modules_in(files[MODULES])
    if read_json(files[SETTINGS]).get("model_type") != CROSS_ENCODER or len(modules) != 3:
        return {}
    if [kind_of(module) for module in modules[1:]] != ["Pooling", "Dense"]:
        return {}
    pooling, dense = (module["path"] for module in modules[1:])
    about = read_json(files[f"{dense}/config.json"])
    linear = about.get("activation_function") == _IDENTITY and not about.get("use_residual")
    read = about.get("module_input_name", "sentence_embedding"), about.get("module_output_name")
    if not linear or read != ("sentence_embedding", "scores") or about.get("bias") is False:
        return {}
    if pooling_of(read_json(files[f"{pooling}/config.json"])) not in ("mean", "mean_tokens"):
        return {}
    file = files.get(f"{dense}/{SAFETENSORS}") or files[f"{dense}/{BIN}"]
    stored = tensors_in(file)
    return {
        part: replace(stored[name], source_names=(f"{dense}/{name}",))
        for part, name in PARTS.items()
    }


def write_head(
    head: Sequence[TensorGroup],
    folder: Path,
    *,
    hidden_size: int,
    max_length: int,
    dtype: torch.dtype,
) -> None:
    """Write the files beside those of the encoder. `head`: its tensors, as PARTS names them."""
    files = pooling_files(TextPooling(trained=True), hidden_size, max_length)
    of_dense = {"idx": 2, "name": "2", "path": _DENSE, "type": "sentence_transformers.models.Dense"}
    files[MODULES] = [*files[MODULES], of_dense]
    files[SETTINGS] = {
        "model_type": CROSS_ENCODER,
        "prompts": {},
        "default_prompt_name": None,
        "activation_fn": _IDENTITY,
    }
    files[f"{_DENSE}/config.json"] = {
        "in_features": hidden_size,
        "out_features": head[0].shape[0],
        "bias": True,
        "activation_function": _IDENTITY,
        "module_input_name": "sentence_embedding",
        "module_output_name": "scores",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content)
    write_file(folder / _DENSE / SAFETENSORS, head, dtype)
