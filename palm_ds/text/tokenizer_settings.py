"""Reads the tokenizer settings of a Hugging Face folder, apart from the vocabulary.

    tokenizer_config.json     the class, its normalization, special tokens, added tokens, limits
    special_tokens_map.json   } parts of these settings, as written
    added_tokens.json         } by older versions of transformers
    config.json               the model, which implies a tokenizer class if none is named

transformers' BertTokenizer and MPNetTokenizer take the normalization from these files even if
tokenizer.json has its own, those of ALBERT and DeBERTa their rules (`CLASS_RULES`), and
RobertaTokenizer `add_prefix_space`; other classes take everything from tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError
from palm_ds.text import custom_tokenizer
from palm_ds.text.sentencepiece_model import ALBERT, CLASS_RULES, DEBERTA, UNLISTED, ClassRules
from palm_ds.text.vocabulary_file import read_text
from palm_ds.text.word_segmenter import KEY, SIMPLIFY, check_kind

ROLE_TOKENS = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
ROLES = tuple(ROLE_TOKENS)
_BOUNDS = ("bos", "eos")
_FILE = "tokenizer_config.json"
_BERT = (
    *("Bert", "Electra", "DistilBert", "MobileBert", "ConvBert", "SqueezeBert", "LayoutLM"),
    *("Ernie", "RobertaChinese", "UNIMO"),  # PaddleNLP's
)
_CLASS_OF_MODEL = {
    **dict.fromkeys(("bert", "ernie", "electra", "distilbert", "nomic_bert"), "BertTokenizer"),
    "mpnet": "MPNetTokenizer",
    "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
_ROBERTA = ("Roberta", "RobertaBPE")  # the latter is PaddleNLP's
_MPNET = "mpnet"
"""The family of MPNet's class: BERT's normalization, and RoBERTa's separators."""
_FAMILIES = {
    **dict.fromkeys(_BERT, "bert"),
    **dict.fromkeys(_ROBERTA, "roberta"),
    **{"MPNet": _MPNET, "Albert": ALBERT, "DebertaV2": DEBERTA},
}
"""{class: family}"""
_LOWER = ("bert", _MPNET)
"""Those that lower-case texts by default."""
_LIKE_ROBERTA = (*_ROBERTA, "XLMRoberta", "Camembert")
_PREFIXING = ("Albert", "XLMRoberta", "Camembert")
"""Those that mark no word at all with `add_prefix_space: false`, whatever tokenizer.json says."""
_BACKEND = "TokenizersBackend"
"""What transformers 5 writes for PreTrainedTokenizerFast; unlike that, it gives no token types."""
_WITHOUT_TOKEN_TYPES = ("DistilBert", "MPNet", _BACKEND, *_LIKE_ROBERTA)
ROBERTA_ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
"""{role: token} of RoBERTa's classes."""
_USUAL = {
    "bert": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "roberta": ROBERTA_ROLES,
    _MPNET: {**ROBERTA_ROLES, "unk": "[UNK]"},
}
_ANY = ("", "ErnieTinyTokenizer", "ErnieMTokenizer", "PreTrainedTokenizerFast", _BACKEND)
"""Classes that take everything from tokenizer.json, or whose rules follow from the other files."""
_KEPT_KEYS = (
    UNLISTED,
    "model_max_length",
    "padding_side",
    "truncation_side",
    "additional_special_tokens",
    "extra_special_tokens",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "model_input_names",
    "add_prefix_space",
    "pad_token_type_id",
    "pad_to_multiple_of",
)


@dataclass(frozen=True, kw_only=True)
class KeptSettings:
    """Settings that do not change the ids of a text; saved as they were."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of tokenizer_config.json."""
    padding: Mapping[str, Any] | None = None
    truncation: Mapping[str, Any] | None = None
    """Settings in tokenizer.json, for programs that read nothing else."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The tokenizer settings of a folder."""

    family: str = ""
    """bert, roberta, mpnet, albert or deberta: whose rules the class follows; empty: none of them,
    or no class is named."""
    unknown: str = ""
    """A class with unknown rules, so that a bare vocab.txt cannot be read."""
    lower: bool | None = None
    """None means not given."""
    strip_accents: bool | None = None
    chinese: bool = True
    """Whether each Chinese character is a word."""
    add_prefix_space: bool = False
    rules: ClassRules | None = None
    """Those of ALBERT's and DeBERTa's class."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """{role: token} of the named special tokens."""
    usual: Mapping[str, str] = field(default_factory=dict)
    """{role: token} that the class uses by default."""
    bounds: Mapping[str, str] = field(default_factory=dict)
    """The tokens named `bos` and `eos`."""
    tokens: Mapping[str, AddedToken] = field(default_factory=dict)
    """Tokens matched in a text before it is split, with their matching options."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Required ids of tokens added to the vocabulary."""
    word_segmenter: str = ""
    """How ERNIE tiny splits a text into words (palm_ds/text/word_segmenter.py)."""
    simplify: bool = False
    """Whether it simplifies Chinese before."""
    custom: object = None
    """The class of the user's own that splits texts, and its options
    (palm_ds/text/custom_tokenizer.py)."""
    kept: KeptSettings = KeptSettings()


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a folder; empty if no file has any. Raises UserError."""
    values = _read(folder / _FILE)
    named = values.get("tokenizer_class") or _class_of_model(folder)
    name = str(named or "").removesuffix("Fast").removesuffix("Tokenizer")
    known = f"{name}Tokenizer" in _CLASS_OF_MODEL.values() or named in _ANY or not named
    if name in _PREFIXING and values.get("add_prefix_space") is False:
        raise UserError(
            f"{folder / _FILE}: add_prefix_space: false is not known here for {name}Tokenizer; "
            "remove it if the model was trained with a space before each text, as is usual"
        )
    values, tokens, ids = _tokens(folder, values)
    family = _FAMILIES.get(name, "")
    usual = "roberta" if name in _LIKE_ROBERTA else family
    return TokenizerSettings(
        family=family,
        unknown="" if known or family else str(named),
        lower=_flag(folder, values, "do_lower_case", True if family in _LOWER else None),
        strip_accents=_flag(folder, values, "strip_accents", None),
        chinese=_flag(folder, values, "tokenize_chinese_chars", True) is not False,
        add_prefix_space=_flag(folder, values, "add_prefix_space", False) is True,
        roles={
            role: _text(values[f"{role}_token"]) for role in ROLES if values.get(f"{role}_token")
        },
        bounds={
            role: _text(values[f"{role}_token"]) for role in _BOUNDS if values.get(f"{role}_token")
        },
        rules=class_rules(folder, family),
        usual=_USUAL.get(usual, _USUAL["bert"]) if named else {},
        tokens=tokens,
        ids=ids,
        word_segmenter=check_kind(values.get(KEY), str(folder / _FILE)),
        simplify=_flag(folder, values, SIMPLIFY, False) is True,
        custom=values.get(custom_tokenizer.KEY),
        kept=KeptSettings(config=_kept(folder, values, name)),
    )


def class_rules(folder: Path, layout: str) -> ClassRules | None:
    """The rules that the class of a layout has in a folder; None if it has none to state. Raises
    UserError."""
    if layout not in CLASS_RULES:
        return None
    values, usual = _read(folder / _FILE), asdict(CLASS_RULES[layout]())
    given = {x: _flag(folder, values, x, default) for x, default in usual.items()}
    return CLASS_RULES[layout](**{x: usual[x] if y is None else y for x, y in given.items()})


def _class_of_model(folder: Path) -> str:
    """The tokenizer class that transformers uses for the model of a folder."""
    about = _read(folder / "config.json")
    return about.get("tokenizer_class") or _CLASS_OF_MODEL.get(str(about.get("model_type")), "")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(read_text(file))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: not a JSON object, but {type(values).__name__}")
    return values


def _flag(folder: Path, values: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    value = values.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{folder / _FILE}: {key}: expected true or false, got {value!r}")
    return value


def _text(token: object) -> str:
    """A token is given as its text, or as an object with its matching options."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _kept(folder: Path, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    kept = {key: values[key] for key in _KEPT_KEYS if values.get(key) is not None}
    if "max_len" in values:  # the earlier name
        kept.setdefault("model_max_length", values["max_len"])
    length = kept.get("model_max_length", 1)
    if isinstance(length, bool) or not isinstance(length, int | float) or not length >= 1:
        raise UserError(
            f"{folder / _FILE}: model_max_length: expected a number above 0, got {length!r}"
        )
    for pair in kept.get(UNLISTED, []):
        if not (isinstance(pair, list) and list(map(type, pair)) == [str, float]):
            raise UserError(f"{folder / _FILE}: {UNLISTED}: expected pieces and their scores")
    own = {f"{role}_token" for role in ROLES}
    kept |= {
        key: value
        for key, value in values.items()
        if key.endswith("_token") and key not in own and isinstance(value, str | dict)
    }
    if name in _WITHOUT_TOKEN_TYPES:
        kept.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return kept


# ---- special and added tokens ----


def _tokens(
    folder: Path, values: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, AddedToken], dict[str, int]]:
    """(settings with the special tokens of older files, tokens matched before splitting, ids of
    added tokens), merged as in transformers."""
    tokens: dict[str, AddedToken] = {}
    ids: dict[str, int] = {}
    try:
        if isinstance(decoder := values.get("added_tokens_decoder"), dict):
            for number, each in decoder.items():
                token = _added(each)
                tokens[token.content], ids[token.content] = token, int(number)
        else:
            values = values | {
                key: {**value, "__type": "AddedToken", "special": True}
                if isinstance(value, dict)
                else value
                for key, value in _read(folder / "special_tokens_map.json").items()
            }
            special = {_text(values[key]) for key in values if key.endswith("_token")}
            for text, number in _read(folder / "added_tokens.json").items():
                token = AddedToken(text, normalized=text not in special, special=text in special)
                tokens[text], ids[text] = token, int(number)
        for key, each in values.items():
            if key.endswith("_token") and isinstance(each, dict):
                tokens[_text(each)] = _added({**each, "special": True})
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{folder / _FILE}: its added tokens cannot be read: {error}") from None
    return values, tokens, ids


def _added(value: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{key: item for key, item in value.items() if key != "__type"})


# ---- to a tokenizer ----


def bert_normalizer(settings: TokenizerSettings, lower: bool) -> normalizers.BertNormalizer:
    """Normalizer that cleans a text as BertTokenizer does."""
    return normalizers.BertNormalizer(
        lowercase=lower,
        strip_accents=settings.strip_accents,
        handle_chinese_chars=settings.chinese,
    )


def roles_in(settings: TokenizerSettings, known: Mapping[str, int]) -> dict[str, str]:
    """{role: token}: the named tokens, else the class's defaults if the vocabulary has them, else
    what bounds a text in a decoder's tokenizer. One that splits into bytes needs no unknown token;
    padding then has its role."""
    usual = {role: token for role, token in settings.usual.items() if token in known}
    bounds = {"cls": settings.bounds.get("bos", ""), "sep": settings.bounds.get("eos", "")}
    if settings.bounds:
        bounds["unk"] = settings.roles.get("pad", "")
    named = {
        role: token
        for role, token in bounds.items()
        if token in known and not any(usual in known for usual in ROLE_TOKENS[role])
    }
    return {**named, **usual, **settings.roles}


def apply_settings(backend: Backend, settings: TokenizerSettings) -> None:
    """Apply the settings that a tokenizer.json's class takes from the other files."""
    model = backend.model
    plain = backend.normalizer is None or isinstance(backend.normalizer, normalizers.BertNormalizer)
    if settings.family in _LOWER and isinstance(model, models.WordPiece) and plain:
        backend.normalizer = bert_normalizer(settings, settings.lower is not False)
        backend.post_processor = None  # it is made of the special tokens
        model.unk_token = settings.roles.get("unk", "[UNK]")
        backend.model = model
        separate_texts(backend, settings)
    split = backend.pre_tokenizer
    if settings.family == "roberta" and isinstance(split, pre_tokenizers.ByteLevel):
        split.add_prefix_space = settings.add_prefix_space
        backend.pre_tokenizer = split
        separate_texts(backend, settings)
    if settings.rules and isinstance(model, models.Unigram):
        settings.rules.apply(backend)


def separate_texts(backend: Backend, settings: TokenizerSettings) -> None:
    """Put special tokens around texts, for classes that have other separators than BERT's."""
    if settings.family not in ("roberta", _MPNET):
        return
    sep, cls = settings.roles.get("sep", "</s>"), settings.roles.get("cls", "<s>")
    sep_id, cls_id = backend.token_to_id(sep), backend.token_to_id(cls)
    if sep_id is not None and cls_id is not None:
        space = settings.add_prefix_space
        backend.post_processor = processors.RobertaProcessing(
            (sep, sep_id), (cls, cls_id), trim_offsets=True, add_prefix_space=space
        )


def adds_special_tokens(backend: Backend) -> bool:
    """Whether it puts special tokens around a text."""
    return backend.num_special_tokens_to_add(False) > 0


def normalization(backend: Backend, *, lower: bool) -> dict[str, bool | None]:
    """BERT's settings, for programs that read only vocab.txt."""
    normalizer = backend.normalizer
    if not isinstance(normalizer, normalizers.BertNormalizer):
        return {"do_lower_case": lower}
    return {
        "do_lower_case": lower,
        "strip_accents": normalizer.strip_accents,
        "tokenize_chinese_chars": normalizer.handle_chinese_chars,
    }


def joins_pairs(backend: Backend, kept: KeptSettings) -> dict[str, int]:
    """Form in which a model is given two texts: `separators` and `second_type` of SpecialTokens.
    Without special tokens of its own, it is exported with BERT's (exported_tokenizer.py)."""
    added = backend.num_special_tokens_to_add(True) - backend.num_special_tokens_to_add(False)
    typed = not adds_special_tokens(backend) or max(backend.encode("a", "a").type_ids) > 0
    read = "token_type_ids" in kept.config.get("model_input_names", ("token_type_ids",))
    return {"separators": max(added, 1), "second_type": int(typed and read)}


def add_settings_tokens(backend: Backend, settings: TokenizerSettings, where: str) -> None:
    """Add the tokens of the settings to a vocabulary; existing ones are matched before splitting
    from now on. Raises UserError if a token gets another id than the settings require."""
    added = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    named = settings.roles.values()
    for text in sorted(settings.tokens, key=lambda each: settings.ids.get(each, -1)):
        token = settings.tokens[text]
        if text not in settings.ids and backend.token_to_id(text) is None:
            continue  # transformers adds it when it opens the saved files, as it did before
        token.special = token.special or text in named
        if added.get(text) != repr(token):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (number := settings.ids.get(text, -1)) not in (-1, backend.token_to_id(text)):
            raise UserError(
                f"{where}: {text!r} has id {backend.token_to_id(text)}, but {number} in the "
                "tokenizer's configuration"
            )
    plain = [text for text in _specials(settings) if text not in added | dict(settings.tokens)]
    known = [text for text in plain if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in known])


def _specials(settings: TokenizerSettings) -> list[str]:
    """The texts of all named special tokens."""
    config = settings.kept.config
    texts = [*settings.roles.values()]
    texts += [_text(value) for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key) or ()
        texts += map(_text, listed.values() if isinstance(listed, dict) else listed)
    return texts


# ---- roles ----


def find_role(role: str, known: Mapping[str, int], origin: str, given: str = "") -> str:
    """The token of a role: the given one, or a usual one. Raises UserError if there is none."""
    if given and given not in known:
        raise UserError(f"{origin}: the vocabulary has no {given!r}, the given {role}_token")
    for token in [given] if given else ROLE_TOKENS[role]:
        if token in known:
            return token
    wanted = " or ".join(ROLE_TOKENS[role])
    raise UserError(f"{origin}: the vocabulary has no {wanted} token ({role}); add one")


def bert_template(
    roles: Mapping[str, str],
    known: Mapping[str, int],
    *,
    separators: int = 1,
    second_type: int = 1,
) -> processors.TemplateProcessing:
    """BERT's special tokens around one text and two; `separators`, `second_type`: those of
    SpecialTokens."""
    cls, sep = roles["cls"], roles["sep"]
    between = " ".join([sep] * separators)
    return processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {between} $B:{second_type} {sep}:{second_type}",
        special_tokens=[(cls, known[cls]), (sep, known[sep])],
    )
