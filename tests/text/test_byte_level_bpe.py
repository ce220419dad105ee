"""RoBERTa's vocab.json and merges.txt: the ids of transformers from the same two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.text.byte_level_bpe import is_roberta_bpe, write_byte_level_bpe
from palm_ds.text.tokenizer import load_tokenizer
from tests.helpers.byte_level_bpe import TEXTS, bpe_folder

SETTINGS: dict[str, dict[str, Any] | None] = {
    "named": {"tokenizer_class": "RobertaTokenizer"},
    "by PaddleNLP": {"tokenizer_class": "RobertaBPETokenizer"},
    "by the model": None,
    "a space in front": {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True},
    "another mask": {"tokenizer_class": "RobertaTokenizer", "mask_token": "<unk>"},
}


def as_transformers(folder: Path, settings: dict[str, Any] | None, to: Path) -> Path:
    """The same files under the class name that transformers knows."""
    known = dict(settings or {}, tokenizer_class="RobertaTokenizer")
    return bpe_folder(to, known)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_two_files_have_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    folder = bpe_folder(tmp_path / "source", settings)
    if settings is None:
        (folder / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    theirs = AutoTokenizer.from_pretrained(as_transformers(folder, settings, tmp_path / "hf"))
    plain = AutoTokenizer.from_pretrained(tmp_path / "hf", split_special_tokens=True)
    ours = load_tokenizer(folder)
    ours.save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ours.vocabulary.mask == theirs.mask_token_id and ours.vocabulary.separators == 2
    for text, (ids, _) in zip(TEXTS, ours.encode_texts(TEXTS), strict=True):
        assert ids.tolist() == plain(text, add_special_tokens=False)["input_ids"]
        assert again(text)["input_ids"] == theirs(text)["input_ids"]
    assert again(TEXTS[0], TEXTS[1])["input_ids"] == theirs(TEXTS[0], TEXTS[1])["input_ids"]


def test_written_again_the_files_are_the_same(tmp_path: Path) -> None:
    source = bpe_folder(tmp_path / "source", SETTINGS["named"])
    tokenizer = load_tokenizer(source)
    assert is_roberta_bpe(tokenizer.backend)
    (tmp_path / "out").mkdir()
    write_byte_level_bpe(tokenizer.backend, tmp_path / "out")
    one, other = ((f / "vocab.json").read_text("utf-8") for f in (source, tmp_path / "out"))
    assert list(json.loads(one).items()) == list(json.loads(other).items())
    assert (tmp_path / "out/merges.txt").read_bytes() == (source / "merges.txt").read_bytes()


MISTAKES = {
    "no merges": (lambda f: (f / "merges.txt").unlink(), "merges.txt: is missing"),
    "half a merge": (lambda f: (f / "merges.txt").write_text("a\n"), "line 1: expected two pieces"),
    "an unknown piece": (lambda f: (f / "merges.txt").write_text("qq zz\n"), "tokenizer.json: "),
    "no JSON": (lambda f: (f / "vocab.json").write_text("{"), "not JSON"),
    "no object": (lambda f: (f / "vocab.json").write_text("[1]"), "expected an object of tokens"),
    "text as an id": (lambda f: (f / "vocab.json").write_text('{"a": "b"}'), "expected an object"),
    "a token twice": (lambda f: (f / "vocab.json").write_text('{"a": 1, "a": 2}'), '"a"'),
    "no special tokens": (lambda f: (f / "vocab.json").write_text('{"a": 0}'), "has no '<s>'"),
    "a large id": (
        lambda f: (f / "vocab.json").write_text('{"<s>": 0, "</s>": 1, "<mask>": 99999999}'),
        "has the id 99999999",
    ),
    "another class": (
        lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}'),
        "is of a GPT2Tokenizer, whose rules are not known here",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, tmp_path: Path) -> None:
    folder = bpe_folder(tmp_path, SETTINGS["named"])
    breaks, message = MISTAKES[name]
    breaks(folder)
    with pytest.raises(UserError, match=message) as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)
