"""WordPiece and SentencePiece: ids of the original libraries, malformed files, words."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from palm_ds.common.errors import UserError
from palm_ds.text.sentencepiece_model import write_ernie_m
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, load_tokenizer, sentencepiece, wordpiece
from palm_ds.text.tokenizer_settings import KeptSettings
from palm_ds.text.train_tokenizer import train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps. The fox, quicker, jumps again.",
    "Unbelievable! Dogs and foxes are believable, he said. Jumping foxes sleep quickly.",
    "我们在北京学习。 学习使我们快乐，北京使我们快乐。 dogs 在北京 sleeping 2024 年。",
] * 4


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(TEXTS, kind="wordpiece", vocab_size=220, lower=True)


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return train_tokenizer(TEXTS, kind="sentencepiece", vocab_size=150, lower=False)


def test_wordpiece_splits_words_and_chinese_characters(small: Tokenizer) -> None:
    ids, at = small.encode_texts(["The foxes 在北京!"])[0]
    assert small.tokens(ids)[-4:] == ["在", "北", "京", "[UNK]"] or small.tokens(ids)[-1] == "!"
    assert small.decode(ids).startswith("the foxes 在 北 京")
    assert at[-4:].tolist() == [10, 11, 12, 13]


def test_encode_words_encodes_each_word_alone(small: Tokenizer) -> None:
    words = ["Unbelievable", "dogs", "京"]
    joined = [i for ids in small.encode_words(words) for i in ids]
    assert joined == small.encode_texts([" ".join(words)])[0][0].tolist()


def test_special_tokens_in_a_text_are_text(small: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (small, pieces):
        ids = tokenizer.encode_texts(["[MASK] the [SEP]"])[0][0].tolist()
        v = tokenizer.vocabulary
        assert not {v.mask, v.sep, v.cls, v.pad} & set(ids)


def test_a_text_without_utf8_is_named(small: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"^text 1: lone surrogate at character 4$"):
        small.encode_texts(["fox", "dog\ud800"])


def test_regular_ids_are_neither_special_nor_unused() -> None:
    tokens = [*SPECIALS, "[unused0]", "[unused17]", "a", "##b"]
    vocabulary = wordpiece(tokens, lower=None).vocabulary
    assert vocabulary.regular.tolist() == [7, 8]
    assert (vocabulary.size, vocabulary.pad, vocabulary.unk) == (9, 0, 1)
    assert (vocabulary.cls, vocabulary.sep, vocabulary.mask) == (2, 3, 4)


def test_an_error_of_the_texts_is_named() -> None:
    """SentencePiece adds where it was raised, which was all that was shown."""

    def texts() -> Iterator[str]:
        yield "some words"
        raise ValueError("a.txt: line 3 is wrong")

    with pytest.raises(UserError, match="--vocab_size 150: .*ValueError: a.txt: line 3 is wrong$"):
        train_tokenizer(texts(), kind="sentencepiece", vocab_size=150, lower=False)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_saved_files_open_here_and_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(TEXTS, kind=kind, vocab_size=150, lower=kind == "wordpiece")
    tokenizer.save(tmp_path)
    again, peer = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    v = tokenizer.vocabulary
    assert (peer.pad_token_id, peer.cls_token_id) == (v.pad, v.cls)
    assert (peer.sep_token_id, peer.mask_token_id, peer.unk_token_id) == (v.sep, v.mask, v.unk)
    for text in TEXTS[:3]:
        ids = tokenizer.encode_texts([text])[0][0].tolist()
        assert peer(text)["input_ids"] == [v.cls, *ids, v.sep]
        assert again.encode_texts([text])[0][0].tolist() == ids


def test_a_tokenizer_pickles(small: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(small))
    assert again.fingerprint == small.fingerprint
    assert again.encode_words(["foxes"]) == small.encode_words(["foxes"])


def test_training_gives_the_same_bytes_every_time(root: Path) -> None:
    """Also in other processes, unlike the library's own WordPiece trainer."""
    import subprocess
    import sys

    code = (
        "from tests.text.test_tokenizer import *\n"
        "for kind in ('wordpiece', 'sentencepiece'):\n"
        "    print(train_tokenizer(TEXTS, kind=kind, vocab_size=150).fingerprint)"
    )
    run = [sys.executable, "-c", code]
    outputs = {subprocess.run(run, cwd=root, capture_output=True, check=True).stdout for _ in "12"}
    assert len(outputs) == 1 and len(outputs.pop().split()) == 2


def test_wordpiece_training_finds_the_frequent_words(small: Tokenizer) -> None:
    known = small.backend.get_vocab()
    assert {"the", "fox", "北", "京"} <= set(known)
    assert not any(len(t) > 1 and "\u4e00" <= t[-1] <= "\u9fff" for t in known)
    assert small.size <= 220


def test_long_lines_of_chinese_are_trained_on() -> None:
    tokenizer = train_tokenizer(
        ["学习北京" * 500, "𠮷" * 2000, *TEXTS], kind="sentencepiece", vocab_size=150
    )
    assert tokenizer.backend.token_to_id("𠮷") is not None


def sentencepiece_of_texts(**options: Any) -> bytes:
    """A model that SentencePiece trains on TEXTS."""
    import io

    import sentencepiece as spm

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def test_sentencepiece_model_gives_the_library_s_ids() -> None:
    """The compiled tokenizer against sentencepiece itself, unigram and BPE, and with pieces of
    several words."""
    import sentencepiece as spm

    phrases = {"model_type": "unigram", "split_by_whitespace": False, "max_sentencepiece_length": 9}
    for kind in ({"model_type": "unigram"}, {"model_type": "bpe"}, phrases):
        roles = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3, "control_symbols": ["<mask>"]}
        model = sentencepiece_of_texts(**roles, **kind)
        ours = sentencepiece(model, origin="test")
        reference = spm.SentencePieceProcessor(model_proto=model)
        for text in [*TEXTS[:3], "  spaces   and\ttabs ", "Ünïcödé fi ２０２４", "dogs"]:
            ids = ours.encode_texts([text])[0][0].tolist()
            assert ids == reference.encode(text), (kind, text)
        several = [
            x for text in TEXTS for x in reference.encode(text, out_type=str) if "▁" in x[1:]
        ]
        assert bool(several) == (kind is phrases)


def test_a_model_whose_pieces_end_in_spaces_is_refused() -> None:
    model = sentencepiece_of_texts(treat_whitespace_as_suffix=True)
    with pytest.raises(UserError, match="test: its pieces end in spaces .* is not supported"):
        sentencepiece(model, origin="test")


def test_ernie_and_bert_vocabularies(shared: Path) -> None:
    chinese = load_tokenizer(shared / "data/ernie/vocab.txt")
    assert (chinese.size, chinese.vocabulary.unk, chinese.lower) == (17_964, 17_963, True)
    assert chinese.tokens([5, 6]) == ["的", "、"]
    english = load_tokenizer(shared / "data/ernie/vocab_en.txt")
    assert english.tokens(english.encode_words(["Unbelievable"])[0]) == ["unbelievable"]


def test_a_cased_vocabulary_keeps_capitals(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "The", "the"]) + "\n", "utf-8")
    assert not load_tokenizer(tmp_path / "vocab.txt").lower
    assert load_tokenizer(tmp_path / "vocab.txt", lower=True).lower
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert load_tokenizer(tmp_path).lower


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_offsets_increase_for_any_text(text: str) -> None:
    tokenizer = wordpiece([*SPECIALS, *"abcdefghij", "##a", "##b", "我"], lower=True)
    text = text.encode("utf-8", "ignore").decode("utf-8")
    ids, at = tokenizer.encode_texts([text])[0]
    assert len(ids) == len(at)
    assert (np.diff(at) >= 0).all() and (at < max(1, len(text))).all()


BAD = {
    "no mask": ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"no \[MASK\]"),
    "twice": (
        "vocab.txt",
        "\n".join([*SPECIALS, "a", "b", "a"]),
        "line 8: 'a' is already on line 6",
    ),
    "empty line": ("vocab.txt", "\n".join([*SPECIALS, "", "b"]), "line 6 is empty"),
    "empty": ("vocab.txt", "", "empty"),
    "wrong id": ("vocab.txt", "[PAD]\t0\n[CLS]\t2\n", "line 2: id '2', expected 1"),
    "not utf-8": ("vocab.txt", b"[PAD]\n\xff\n", "line 2: not UTF-8"),
    "not json": ("tokenizer.json", "{nope", "not JSON"),
    "other json": ("tokenizer.json", "[1, 2]", "no key `model`"),
    "bad json": ("tokenizer.json", json.dumps({"model": {"type": "X"}}), "not a tokenizer.json"),
    "not a model": ("spiece.model", b"\xff\xff\xff", "not a SentencePiece model"),
    "empty model": ("spiece.model", b"", "no pieces"),
    "unknown kind": ("vocab.bin", "x", "unknown file type"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="contains no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "weights/tokenizer").mkdir(parents=True)
    with pytest.raises(UserError, match='vocab.json; did you mean ".*/weights/tokenizer"'):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["xlm-roberta", "camembert"])
def test_a_model_of_fairseq_has_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    """Its first tokens are not pieces of the SentencePiece model."""
    import transformers

    (tmp_path / "sentencepiece.bpe.model").write_bytes(sentencepiece_of_texts())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.size == len(reference) and ours.vocabulary.mask == reference.mask_token_id
    for text in [*TEXTS[:3], " Größe  und Maß 😀", "ﬁne ① ｆｕｌｌ", ""]:
        ids = ours.encode_texts([text])[0][0].tolist()
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
    ours.save(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "reference")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    for texts in (["a dog"], ["a dog", "a fox"], ["a <mask> dog"]):
        assert again(*texts)["input_ids"] == reference(*texts)["input_ids"]
    json_file = load_tokenizer(tmp_path / "reference")
    for text in TEXTS[:3]:
        assert np.array_equal(json_file.encode_texts([text])[0][0], ours.encode_texts([text])[0][0])


def listed(folder: Path, kind: str = "unigram") -> tuple[Path, bytes, list[str]]:
    """A vocab.txt that lists the pieces of a model in another order, the model, and its tokens."""
    import io

    import sentencepiece as spm

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.lower() for text in TEXTS),
        model_writer=model,
        model_type=kind,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = spm.SentencePieceProcessor(model_proto=model.getvalue())
    names = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())][3:]
    tokens = [*SPECIALS, *reversed(names)]
    folder.mkdir(exist_ok=True)
    lines = [f"{token}\t{number}\n" for number, token in enumerate(tokens)]
    (folder / "vocab.txt").write_text("".join(lines), "utf-8")
    return folder / "vocab.txt", model.getvalue(), tokens


_PIECES = {
    "xlm-roberta": ("sentencepiece.bpe.model", {}),
    "albert": (
        "spiece.model",
        {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>"}
        | {"control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
    ),
    "deberta-v2": (
        "spm.model",
        {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]"}
        | {"bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    ),
}
"""{model type: its .model, and how it is trained}"""


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", list(_PIECES))
def test_the_settings_beside_a_model_apply(kind: str, old: bool, tmp_path: Path) -> None:
    """Added tokens, in either of the files that have them, lower case, and what is kept."""
    import io

    import sentencepiece as spm
    import transformers

    (file, how), model = _PIECES[kind], io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.lower() for text in TEXTS),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
        **how,
    )
    (tmp_path / file).write_bytes(model.getvalue())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    plain = load_tokenizer(tmp_path)
    number, added = plain.size, {"dogfood": plain.size}
    if kind == "deberta-v2":  # whose model has no mask token
        added[plain.roles["mask"]] = plain.vocabulary.mask
    about: dict = {"do_lower_case": True, "model_max_length": 77}
    if old:
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    else:
        about["added_tokens_decoder"] = {
            str(i): {"content": token, "normalized": i == number, "special": i != number}
            for token, i in added.items()
        }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.size == len(theirs) == number + 1
    for text in ("The fox eats dogfood and jumps.", "dogfood", "Foxes, dogfood!"):
        ids = ours.encode_texts([text])[0][0].tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"] and number in ids, text
    ours.save(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.model_max_length == 77
    assert number in again("The fox eats dogfood.")["input_ids"]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("albert", {"do_lower_case": False}),
        ("albert", {"keep_accents": True}),
        ("deberta-v2", {"do_lower_case": True}),
        ("deberta-v2", {"split_by_punct": True}),
    ],
)
def test_settings_of_alberts_and_debertas_class_win_over_tokenizer_json(
    kind: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    """And apply to a model alone."""
    import sentencepiece as spm
    import transformers

    (file, how), source = _PIECES[kind], tmp_path / "model"
    source.mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "Café café É é A DOG"] * 3),
        model_prefix=str(source / file.removesuffix(".model")),
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
        **how,
    )
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    usual = transformers.AutoTokenizer.from_pretrained(source)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    usual.save_pretrained(tmp_path / "json")
    stated = tmp_path / "json/tokenizer_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | settings))
    text = "A DOG, a dog; Café CAFÉ é."
    for folder in (source, tmp_path / "json"):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = load_tokenizer(folder)
        ours.save(tmp_path / "saved")
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert wanted != usual(text, add_special_tokens=False)["input_ids"]
        for each in (ours, load_tokenizer(tmp_path / "saved")):
            assert each.encode_texts([text])[0][0].tolist() == wanted, folder
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert again(text, add_special_tokens=False)["input_ids"] == wanted


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False, "keep_accents": True}])
def test_alberts_model_has_the_ids_of_transformers(settings: dict[str, bool], tmp_path: Path):
    """Also once saved; and a number's comma is a token, as in ALBERT's code."""
    import sentencepiece as spm
    import transformers
    from sentencepiece import sentencepiece_model_pb2 as schema

    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "9 , Café café É é"] * 3),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=120,
        hard_vocab_limit=False,
        **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>"},
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        minloglevel=2,
    )
    model = schema.ModelProto.FromString((tmp_path / "spiece.model").read_bytes())  # pyright: ignore
    model.pieces.add(piece="▁9,", score=-1.0)
    (tmp_path / "spiece.model").write_bytes(model.SerializeToString())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = load_tokenizer(tmp_path), transformers.AlbertTokenizer.from_pretrained(tmp_path)
    ours.save(tmp_path / "saved")
    theirs.save_pretrained(tmp_path / "theirs")
    both = [load_tokenizer(tmp_path / "saved"), load_tokenizer(tmp_path / "theirs")]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*TEXTS, "``Quoted'' CAFÉ  \t é", "two\nlines ﬁ ①"]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        for each in (ours, *both):
            assert each.encode_texts([text])[0][0].tolist() == expected, text
        assert again(text, add_special_tokens=False)["input_ids"] == expected
    assert again("a", "b")["token_type_ids"][-1] == 1
    assert theirs.tokenize("9,") == ["▁9,"]
    assert ours.tokens(ours.encode_texts(["9,"])[0][0])[-1] == ","
    found = ours.vocabulary
    assert (found.pad, found.unk, found.cls, found.sep, found.mask) == tuple(range(5))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("place", ["spm.model", "subword/spm.model"])
def test_pieces_listed_in_a_vocab_txt_have_its_ids(kind: str, place: str, tmp_path: Path) -> None:
    import sentencepiece as spm

    file, model, tokens = listed(tmp_path / "tiny", kind)
    (file.parent / place).parent.mkdir(exist_ok=True)
    (file.parent / place).write_bytes(model)
    known = {token: number for number, token in enumerate(tokens)}
    reference = spm.SentencePieceProcessor(model_proto=model)
    for ours in (load_tokenizer(file), load_tokenizer(file.parent)):
        assert (ours.size, ours.lower, ours.kind) == (len(tokens), True, kind)
        for text in [*TEXTS[:3], "Dogs on 北京 ¤", "[MASK] fox"]:
            expected = [known.get(p, 1) for p in reference.encode(text.lower(), out_type=str)]
            assert ours.encode_texts([text])[0][0].tolist() == expected, text
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == ours.fingerprint


def test_the_settings_beside_listed_pieces_apply(tmp_path: Path) -> None:
    file, model, tokens = listed(tmp_path)
    (tmp_path / "a.model").write_bytes(model)
    plain, number = load_tokenizer(tmp_path), len(tokens)
    about = {
        "model_max_length": 77,
        "unk_token": "[unk]",
        "additional_special_tokens": [tokens[9]],
        "added_tokens_decoder": {str(number): {"content": "dogfood"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    file.write_text(file.read_text("utf-8").replace("[UNK]", "[unk]"), "utf-8")
    ours = load_tokenizer(tmp_path)
    assert ours.vocabulary.unk == plain.vocabulary.unk == ours.encode_texts(["\u4e2d"])[0][0][-1]
    assert 9 in plain.vocabulary.regular and 9 not in ours.vocabulary.regular
    ours.save(tmp_path / "saved")
    for one in (ours, load_tokenizer(tmp_path / "saved")):
        assert one.size == number + 1 and one.kept.config["model_max_length"] == 77
        assert number in one.encode_texts(["the dogfood"])[0][0]
        ids = one.encode_texts(["the fox jumps"])[0][0].tolist()
        assert ids == plain.encode_texts(["the fox jumps"])[0][0].tolist()


def test_ernie_m_lists_pieces_and_joins_texts_with_two_separators(tmp_path: Path) -> None:
    """Ids are the lines of vocab.txt, not the model's; texts are simplified as in ERNIE's code, and
    never lower-cased, whatever PaddleNLP's settings say."""
    import sentencepiece as spm
    import transformers
    from sentencepiece import sentencepiece_model_pb2 as schema

    _, trained, _ = listed(tmp_path / "listed")
    model = schema.ModelProto.FromString(trained)  # pyright: ignore
    for piece in ("▁9,", "▁9", "9", ",", "'", '"', "-", "A", "▁A"):
        if piece not in {each.piece for each in model.pieces}:
            model.pieces.add(piece=piece, score=-1.0 if piece == "▁9," else -4.0)
    names = [each.piece for each in model.pieces][3:]
    tokens = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *reversed(names), "[MASK]"]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model.SerializeToString())
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    about = {"tokenizer_class": "ErnieMTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))

    reference = spm.SentencePieceProcessor(model_proto=model.SerializeToString())
    known = {token: number for number, token in enumerate(tokens)}
    ours = load_tokenizer(tmp_path)
    ours.save(tmp_path / "saved")
    again, theirs = (
        load_tokenizer(tmp_path / "saved"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    )
    plain = {"“A”\u2014‘dog’": "\"A\"-'dog'", "a\u200bdog\t\u3000 fox\x07": "adog fox"}
    for text, simplified in {**{x.lower(): x.lower() for x in TEXTS}, **plain}.items():
        pieces = reference.encode(simplified, out_type=str)
        expected = [known.get(piece, known["[UNK]"]) for piece in pieces]
        for each in (ours, again):
            assert each.encode_texts([text])[0][0].tolist() == expected, text
        assert theirs(text, add_special_tokens=False)["input_ids"] == expected
    (tmp_path / "files").mkdir()
    write_ernie_m(again.backend, tmp_path / "files")
    assert (tmp_path / "files/vocab.txt").read_bytes() == (tmp_path / "vocab.txt").read_bytes()
    assert load_tokenizer(tmp_path / "files").fingerprint == ours.fingerprint
    written = spm.SentencePieceProcessor(model_file=str(tmp_path / "files/sentencepiece.bpe.model"))
    for text in TEXTS:
        assert written.encode(text, out_type=str) == reference.encode(text, out_type=str)
    assert ours.tokens(ours.encode_texts(["9,"])[0][0]) == ["▁9", ","]
    assert known["▁A"] in ours.encode_texts(["A dog"])[0][0], "not lower-cased"
    joined = theirs("dog", "fox")
    assert [x for x in joined["input_ids"] if x < 3] == [0, 2, 2, 2]
    found = ours.vocabulary
    assert (found.cls, found.pad, found.sep, found.unk) == tuple(range(4))
    assert (found.mask, found.separators, found.second_type) == (len(tokens) - 1, 2, 0)


def test_a_vocab_txt_of_pieces_is_never_read_as_wordpiece(tmp_path: Path) -> None:
    file, model, tokens = listed(tmp_path)
    with pytest.raises(UserError, match="vocab.txt: lists SentencePiece .* put the .model"):
        load_tokenizer(file)
    (tmp_path / "a.model").write_bytes(model)
    (tmp_path / "b.model").write_bytes(model)
    with pytest.raises(UserError, match=r"several .model files \(a.model, b.model\)"):
        load_tokenizer(file)
    (tmp_path / "b.model").unlink()
    file.write_text("\n".join(tokens[:-10]) + "\n", "utf-8")
    with pytest.raises(UserError, match="10 pieces of .* not listed, such as"):
        load_tokenizer(tmp_path)


def test_a_bpe_model_needs_all_its_pieces(tmp_path: Path) -> None:
    file, model, tokens = listed(tmp_path, "bpe")
    (tmp_path / "a.model").write_bytes(model)
    file.write_text("\n".join(tokens[:-1]) + "\n", "utf-8")
    with pytest.raises(UserError, match="1 pieces of .* not listed, such as"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("processor", "inputs", "separators", "second"),
    [
        (None, None, 1, 1),
        (processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)), None, 1, 1),
        (processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)), ["input_ids"], 1, 0),
        (processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)), None, 2, 0),
        (processors.ByteLevel(), None, 1, 1),
    ],
)
def test_two_texts_are_joined_as_by_the_tokenizer(processor, inputs, separators, second, tmp_path):
    tokenizer = wordpiece([*SPECIALS, "a", "b"], lower=False)
    if processor is not None:
        tokenizer.backend.post_processor = processor
    if inputs:
        tokenizer.kept = KeptSettings(config={"model_input_names": inputs})
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        found = each.vocabulary
        assert (found.separators, found.second_type) == (separators, second)
        assert found.around(1) == 2 and found.around(3) == 2 + 2 * separators
        assert found.types(3) == [0, second, 2 * second]
