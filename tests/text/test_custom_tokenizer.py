"""A tokenizer of the user's own: ids, spans, folders, other programs, refusals."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.text.add_tokens import add_tokens
from palm_ds.text.exported_tokenizer import normalizing_tokenizer
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer

OWN = "tests.helpers.own_tokenizer"
VOCABULARY = [*SPECIALS, "un", "be", "li", "ev", "ab", "le", "乾", "干", "unbelievable"]


def folder_of(folder: Path, kind: str, whole: str = "", **options: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    entry = {"kind": f"{OWN}.{kind}", "options": options}
    (folder / "tokenizer_config.json").write_text(json.dumps({"custom_tokenizer": entry}))
    if whole:
        (folder / "whole.txt").write_text(whole)
    return folder


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def test_ids_and_spans(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path / "own", "Pieces"))
    (found,) = tokenizer.encode_spans(["Unbe zz  LIEV"])
    assert found[0].tolist() == ids("un", "be", "[UNK]", "li", "ev")
    assert found[1].tolist() == [[0, 2], [2, 4], [5, 7], [9, 11], [11, 13]]
    assert tokenizer.encode_words(["able", ""]) == [ids("ab", "le"), []]
    assert tokenizer.decode(ids("[CLS]", "un", "be")) == "unbe"
    assert tokenizer.lower and not tokenizer.by_word
    assert tokenizer.vocabulary.mask == VOCABULARY.index("[MASK]")


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path / "own", "Pieces", longest=9))
    (tmp_path / "own/vocab.txt").write_text("[mask]\n")
    assert tokenizer.encode_words(["[MASK]", "[PAD]"]) == [ids("[UNK]")] * 2


def test_saved_with_its_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path / "own", "Pieces", "unbelievable", longest=3))
    assert tokenizer.encode_words(["unbelievable"]) == [ids("unbelievable")]
    tokenizer.of_length(77).save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    copied = pickle.loads(pickle.dumps(again))
    texts = ["Unbe unbelievable abl", ""]
    for other in (again, copied):
        assert other.fingerprint == tokenizer.fingerprint
        for one, two in zip(tokenizer.encode_spans(texts), other.encode_spans(texts), strict=True):
            assert all(map(np.array_equal, one, two))
    other = load_tokenizer(folder_of(tmp_path / "other", "Pieces", "unbelievable", longest=2))
    assert other.fingerprint != tokenizer.fingerprint


def test_other_programs_take_tokens_joined_by_spaces(tmp_path: Path) -> None:
    load_tokenizer(folder_of(tmp_path / "own", "Pieces")).save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("un be li")["input_ids"] == ids("[CLS]", "un", "be", "li", "[SEP]")


def test_texts_are_simplified_before(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path / "own", "Pieces", longest=1))
    simplifying = normalizing_tokenizer(tokenizer, simplify=True)
    simplifying.save(tmp_path / "saved")
    for one in (simplifying, load_tokenizer(tmp_path / "saved")):
        assert one.encode_words(["乾", "乾隆"]) == [ids("干"), ids("乾", "[UNK]")]


def test_tokens_are_not_added(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"split by tests.*Pieces; add the tokens to its vocab.txt"):
        add_tokens(load_tokenizer(folder_of(tmp_path / "own", "Pieces")), {"new": ""})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "Missing",
            {},
            "custom_tokenizer: tests.* has no 'Missing'",
        ),
        ("Pieces", {"long": 2}, 'options.long: unknown key; did you mean "longest"'),
        ("Pieces", {"longest": "b"}, "fails on 'A b,.*: TypeError"),
        ("Outside", {}, r"has spans \[\[0, \d+\]\]; expected \[start, end\) within its"),
        ("Growing", {}, "splits .* into other tokens when it is asked in another order"),
        ("Broken", {}, "fails on '': IndexError"),
        ("Unpicklable", {}, "cannot be pickled, as other processes need: .*local object"),
    ],
)
def test_refused(kind: str, options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder_of(tmp_path / "own", kind, **options))
