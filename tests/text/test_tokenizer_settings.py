"""The ids of AutoTokenizer on a folder, here and on the folder that is saved of it."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from palm_ds.common.errors import UserError
from palm_ds.text.add_tokens import add_tokens
from palm_ds.text.tokenizer import SPECIALS, load_tokenizer

WORDS = [
    *SPECIALS,
    *("<pad>", "<unk>", "<s>", "</s>", "<mask>", "[unused1]", "[BOS]", "[E]"),
    *("hello", "Hello", "HELLO", "world", "##s", "cafe", "café", "Café", "naive", "naïve"),
    *("中", "文", "中文", "##文", "日", "a", "##a", "b", "##b", "A", "##A", "é", "##é", "e", "##e"),
    *("😀", "!", "[", "]", "mask", "MASK", "cls", "<", ">", "i", "I", "İ", "ß", "ss", "S", "x"),
]
TEXTS = [
    "Hello worlds! HELLO café CAFÉ Café naïve",
    "中文 日本 a中b文",
    "cafe\u0301 na\u0131ve İI ß ẞ",  # combining accent, Turkish letters
    "a\u0000b\u200bc\ufeffd\te\u00a0f\u2028g\r\nh\u0007",  # control characters, odd spaces
    "😀 a😀b 👩‍👩‍👧 \U0001f1e8\U0001f1f3",
    "[MASK] a [CLS] [SEP][PAD] [mask] [unused1] [BOS][E] [UNK]",
    "<mask> a <s></s> <pad><unk> <MASK>",
    "  NEW  new <new>x [NEW]  zz Zz ",
    "ａｂＡ ﬁ ㍻ \u0e01\u0e33 \ud55c\uad6d",
    "",
    "x" * 101 + " " + "ab" * 40,
]
ROLES = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
ENDS = {"cls_token": "<s>", "sep_token": "</s>"}
DECODER = {
    "added_tokens_decoder": {
        str(len(WORDS)): {"content": "[NEW]", "special": True, "lstrip": True},
        str(len(WORDS) + 1): {"content": "zz", "normalized": True, "special": False},
    }
}


def folder_of(path: Path, config: Mapping[str, Any] | None, **model: Any) -> Path:
    """A folder with a vocab.txt, settings, and a model's config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), "utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": "bert", **model}))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def ids(folder: Path, **more: Any) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    single = tokenizer(TEXTS)["input_ids"]
    pairs = tokenizer(TEXTS[:4], TEXTS[4:8])["input_ids"]
    return [*single, *pairs]


def compare(source: Path, target: Path) -> None:
    """The same ids by transformers on both folders, and by us where a special token is text."""
    ours = load_tokenizer(source)
    ours.save(target)
    wanted, found = ids(source), ids(target)
    for text, one, other in zip(TEXTS, wanted, found, strict=False):
        assert one == other, text
    assert wanted == found
    for tokenizer in (ours, load_tokenizer(target)):
        plain = AutoTokenizer.from_pretrained(source, split_special_tokens=True)
        for text, (numbers, _) in zip(TEXTS, tokenizer.encode_texts(TEXTS), strict=True):
            assert numbers.tolist() == plain(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.fingerprint == ours.fingerprint
        assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == ours.fingerprint
    assert load_tokenizer(target).vocabulary.mask == ours.vocabulary.mask


@pytest.mark.parametrize("tokens", [{}, ROLES, {**ROLES, **ENDS}, DECODER, {**DECODER, **ROLES}])
def test_every_combination_of_settings_of_bert(tokens: dict, tmp_path: Path) -> None:
    choices = {
        "do_lower_case": [None, True, False],
        "strip_accents": [None, True, False],
        "tokenize_chinese_chars": [None, False],
    }
    for number, values in enumerate(itertools.product(*choices.values())):
        config = {key: x for key, x in zip(choices, values, strict=True) if x is not None}
        source = folder_of(tmp_path / str(number), {**config, **tokens})
        compare(source, tmp_path / f"{number} saved")


def legacy(folder: Path) -> None:
    """As transformers wrote before 4.34."""
    mask = {"content": "[MASK]", "lstrip": True, "rstrip": False, "single_word": False}
    mask["normalized"] = False
    specials = {**ENDS, "mask_token": mask, "additional_special_tokens": ["[BOS]", "[E]"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))
    added = {"NEW": len(WORDS), "zz": len(WORDS) + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added))


def tokenizer_json(
    folder: Path,
    lower: bool,
    strip: bool | None = None,
    chinese: bool = True,
    specials: Sequence[str] = SPECIALS,
) -> None:
    backend = Backend(models.WordPiece({x: i for i, x in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=strip, handle_chinese_chars=chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in specials])
    backend.add_tokens(["NEW"])
    backend.enable_truncation(7, direction="left")
    backend.enable_padding(length=7, direction="left")
    backend.save(str(folder / "tokenizer.json"))


Change = Callable[[Path], object]
OTHERS: dict[str, tuple[dict[str, Any] | None, Change]] = {
    "no settings at all": (None, lambda f: None),
    "no settings but the class of the model": (None, lambda f: tokenizer_json(f, lower=False)),
    "older files": ({"do_lower_case": False}, legacy),
    "older files alone": (None, legacy),
    "tokenizer.json says otherwise": (
        {
            "do_lower_case": False,
            "tokenize_chinese_chars": False,
            "tokenizer_class": "BertTokenizer",
        },
        lambda f: tokenizer_json(f, lower=True),
    ),
    "tokenizer.json says otherwise of accents": (
        {"strip_accents": False, "tokenizer_class": "BertTokenizerFast"},
        lambda f: tokenizer_json(f, lower=False, strip=True, chinese=False),
    ),
    "tokenizer.json alone counts": (
        {"do_lower_case": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        lambda f: tokenizer_json(f, lower=False),
    ),
    "other separators next to tokenizer.json": (
        {**ENDS, **ROLES, "tokenizer_class": "BertTokenizer"},
        lambda f: tokenizer_json(f, lower=True),
    ),
    "added tokens next to tokenizer.json": (
        {
            "tokenizer_class": "BertTokenizer",
            "additional_special_tokens": ["[E]"],
            "added_tokens_decoder": {
                **{str(i): {"content": x, "special": True} for i, x in enumerate(SPECIALS[:4])},
                "4": {"content": "[MASK]", "special": True, "lstrip": True, "normalized": False},
                str(len(WORDS)): {"content": "NEW", "normalized": False, "special": False},
            },
        },
        lambda f: tokenizer_json(f, lower=True),
    ),
    "tokens that are not in the vocabulary": (
        {"bos_token": "[NEW]", "eos_token": "zz", "additional_special_tokens": ["<new>"]},
        lambda f: None,
    ),
    "special tokens are text": ({"split_special_tokens": True}, lambda f: None),
    "another class of the same rules": ({"tokenizer_class": "ElectraTokenizer"}, lambda f: None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files(name: str, tmp_path: Path) -> None:
    config, change = OTHERS[name]
    source = folder_of(tmp_path / "source", config)
    change(source)
    compare(source, tmp_path / "saved")


@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize("config", [None, {"do_lower_case": False, "strip_accents": True}])
@pytest.mark.parametrize("model", ["distilbert", "electra", "nomic_bert", "mpnet"])
def test_a_model_implies_the_class_whose_settings_apply(
    model: str, config: dict[str, Any] | None, backend: bool, tmp_path: Path
) -> None:
    """MPNet's has BERT's normalization and RoBERTa's separators. `backend`: beside a tokenizer.json
    that says otherwise."""
    source = folder_of(tmp_path / "source", config, model_type=model)
    if backend:
        own = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
        specials = own if model == "mpnet" else SPECIALS
        tokenizer_json(source, lower=config is not None, specials=specials)
    compare(source, tmp_path / "saved")


@pytest.mark.parametrize("space", [None, True, False])
@pytest.mark.parametrize("tokens", [{}, {"cls_token": "[CLS]", "sep_token": "[SEP]"}])
def test_roberta_takes_the_space_in_front_from_the_settings(
    space: bool | None, tokens: dict[str, str], tmp_path: Path
) -> None:
    config = {} if space is None else {"add_prefix_space": space}
    source = folder_of(tmp_path / "source", {**config, **tokens}, model_type="roberta")
    (source / "vocab.txt").unlink()
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "he", "Ġhe", "Ġh", "ll"]
    known = {x: i for i, x in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"])}
    known |= {"[CLS]": len(known), "[SEP]": len(known) + 1}
    merges = [("h", "e"), ("Ġ", "h"), ("Ġ", "he"), ("l", "l")]
    backend = Backend(models.BPE(known, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not space)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    backend.save(str(source / "tokenizer.json"))
    compare(source, tmp_path / "saved")


def test_a_line_break_as_a_token_leaves_out_vocab_txt(tmp_path: Path) -> None:
    """The ids behind it would be others there; transformers reads tokenizer.json."""
    for name, text in (("new", "\n"), ("return", "\r")):
        added = [{"content": text, "normalized": False}, {"content": "dog"}]
        numbered = {str(number): token for number, token in enumerate(added, len(WORDS))}
        source = folder_of(tmp_path / name, {"added_tokens_decoder": numbered})
        compare(source, tmp_path / f"{name} saved")
        assert not (tmp_path / f"{name} saved/vocab.txt").exists()


# ---- what does not change the ids ----


def test_limits_and_sides_are_kept(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "BertTokenizer",
        "model_max_length": 77,
        "padding_side": "left",
        "truncation_side": "left",
        "bos_token": "[BOS]",
        "eos_token": "[E]",
        "model_input_names": ["input_ids", "attention_mask"],
        "name_or_path": "some/model",
    }
    source = folder_of(tmp_path / "source", config)
    tokenizer_json(source, lower=True)
    load_tokenizer(source).save(tmp_path / "once")
    again = pickle.loads(pickle.dumps(load_tokenizer(tmp_path / "once")))
    add_tokens(again, {"brandnew": ""}).tokenizer.save(tmp_path / "twice")
    texts = ["a b a b a b a b a b", "a"]
    wanted = AutoTokenizer.from_pretrained(source)
    for name in ("once", "twice"):
        found = AutoTokenizer.from_pretrained(tmp_path / name)
        for key in ("model_max_length", "padding_side", "truncation_side", "model_input_names"):
            assert getattr(found, key) == getattr(wanted, key)
        assert (found.bos_token_id, found.eos_token_id) == (
            WORDS.index("[BOS]"),
            WORDS.index("[E]"),
        )
        given = dict(padding=True, truncation=True, max_length=6)
        assert dict(found(texts, **given)) == dict(wanted(texts, **given))
        bare = Backend.from_file(str(tmp_path / name / "tokenizer.json"))
        assert (
            bare.encode(texts[0]).ids
            == Backend.from_file(str(source / "tokenizer.json")).encode(texts[0]).ids
        )
        assert "somebody" not in (tmp_path / name / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("name", ["BertTokenizer", "DistilBertTokenizer", "TokenizersBackend"])
def test_token_types_of_pairs_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", {"tokenizer_class": name})
    tokenizer_json(source, lower=True)
    load_tokenizer(source).save(tmp_path / "saved")
    for folder in (source, tmp_path / "saved"):
        wanted = AutoTokenizer.from_pretrained(folder)("a", "b").get("token_type_ids", [0])
        assert load_tokenizer(folder).vocabulary.second_type == max(wanted)


def test_named_special_tokens_are_the_roles(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, {**ROLES, **ENDS}))
    v = tokenizer.vocabulary
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    assert [v.pad, v.unk, v.cls, v.sep, v.mask] == [WORDS.index(x) for x in names]
    assert tokenizer.encode_texts(["\u1234"])[0][0].tolist() == [v.unk]


# ---- what is wrong ----

BROKEN: dict[str, tuple[object, str]] = {
    "not in the vocabulary": ({"mask_token": "[M]"}, r"no '\[M\]', the given mask_token"),
    "no flag": ({"strip_accents": "no"}, "strip_accents: expected true or false, got 'no'"),
    "no length": ({"model_max_length": "512"}, "model_max_length: expected a number .* '512'"),
    "no object": ([], "not a JSON object"),
    "other rules": (
        {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"},
        "of a BertJapaneseTokenizer, whose rules are not known here",
    ),
    "another id": (
        {"added_tokens_decoder": {"999": {"content": "new"}}},
        "'new' has id .*, but 999",
    ),
    "no mark of words": (  # to the class's own, whatever tokenizer.json says
        {"tokenizer_class": "XLMRobertaTokenizerFast", "add_prefix_space": False},
        "add_prefix_space: false is not known here for XLMRobertaTokenizer; remove it",
    ),
    "no token": ({"added_tokens_decoder": {"1": 3}}, "added tokens cannot be read"),
    "no number": ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added tokens cannot be read"),
    "no content": ({"mask_token": {"lstrip": True}}, "added tokens cannot be read"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_one_line(what: str, tmp_path: Path) -> None:
    config, message = BROKEN[what]
    folder = folder_of(tmp_path, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
