"""Converts a SentencePiece model, unigram or BPE, to the `tokenizers` library.

spiece.model              ──> backend, ids as in the model
spiece.model + vocab.txt  ──> backend, ids as in vocab.txt (ERNIE lists its pieces that way); those
                              of ERNIE-M begin as XLM-RoBERTa's, texts simplified as its code does
sentencepiece.bpe.model   ──> backend, ids as XLM-RoBERTa or CamemBERT count them
spm.model                 ──> backend, ids as in the model, DeBERTa's [MASK] after them
spiece.model of ALBERT    ──> backend, ids as in the model, texts simplified as its code does
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.text.check_tokenizer_json import check_charsmap, library_errors

WORD_START = "▁"
DEBERTA = "deberta"
"""The layout of a folder with spm.model."""
ALBERT = "albert"
"""The layout of a folder of ALBERT's."""
UNLISTED = "unlisted_pieces"
"""The key of tokenizer_config.json for pieces that vocab.txt lacks, and their scores."""
_UNIGRAM, _BPE = 1, 2  # kinds of model
_UNKNOWN, _CONTROL, _UNUSED = 2, 3, 5  # kinds of piece that text is never split into
_MAX_PIECE_LENGTH = 1_000  # characters
_MAX_UNLISTED_SHARE = 0.05  # of the pieces of a model
_MASKS = ("[MASK]", "<mask>")
ERNIE_M_MODEL = "sentencepiece.bpe.model"
_ERNIE_M = ("[CLS]", "[PAD]", "[SEP]")  # the first tokens, in XLM-RoBERTa's order
_ERNIE_M_ALIKE = {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-"}
_CONTROL_CHARACTERS = r"[\p{Cc}\p{Cf}&&[^\t\n\r]]"

_FAIRSEQ = {  # (tokens in front, pieces of the model that they replace)
    "xlm-roberta": (("<s>", "<pad>", "</s>", "<unk>"), 3),
    "camembert": (("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1),
}
"""Models trained with fairseq: their ids are not those of the SentencePiece model."""


@dataclass(frozen=True, kw_only=True)
class AlbertRules:
    """Steps before ALBERT's model sees a text, under their names in tokenizer_config.json."""

    do_lower_case: bool = True
    keep_accents: bool = False

    def apply(self, backend: Backend) -> None:
        """Give a tokenizer that has other rules these, before the table of its model."""
        steps = _steps(backend.normalizer)
        lower = any(isinstance(step, normalizers.Lowercase) for step in steps)
        accents = not any(isinstance(step, normalizers.StripAccents) for step in steps)
        if (lower, accents) != (self.do_lower_case, self.keep_accents):
            own = [step for step in steps if isinstance(step, normalizers.Precompiled)]
            backend.normalizer = normalizers.Sequence([*self.steps(), *own])

    def steps(self) -> list[normalizers.Normalizer]:
        """Quotation marks are made alike, accents and capitals are removed."""
        rules: list[normalizers.Normalizer] = [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
        ]
        if not self.keep_accents:
            rules += [normalizers.NFKD(), normalizers.StripAccents()]
        return rules + ([normalizers.Lowercase()] if self.do_lower_case else [])


@dataclass(frozen=True, kw_only=True)
class DebertaRules:
    """Likewise of DeBERTa's class."""

    do_lower_case: bool = False
    split_by_punct: bool = False

    def apply(self, backend: Backend) -> None:
        """Give a tokenizer these rules, whatever it has of them."""
        steps = _steps(backend.normalizer)
        own = [step for step in steps if not isinstance(step, normalizers.Lowercase)]
        if self.do_lower_case != (len(own) < len(steps)):
            lower = [normalizers.Lowercase()] if self.do_lower_case else []
            backend.normalizer = normalizers.Sequence([*lower, *own])
        splits = _splits(backend.pre_tokenizer)
        words = [split for split in splits if not isinstance(split, pre_tokenizers.Punctuation)]
        if self.split_by_punct != (len(words) < len(splits)):
            marks = [pre_tokenizers.Punctuation("isolated")] if self.split_by_punct else []
            backend.pre_tokenizer = pre_tokenizers.Sequence([*marks, *words])


ClassRules = AlbertRules | DebertaRules
CLASS_RULES: Mapping[str, type[ClassRules]] = {ALBERT: AlbertRules, DEBERTA: DebertaRules}
"""{layout: the rules that the settings of its class state}"""


def _steps(normalizer: normalizers.Normalizer | None) -> list[normalizers.Normalizer]:
    """The steps of a normalizer, those of sequences in it too."""
    if isinstance(normalizer, normalizers.Sequence):
        return [step for part in normalizer for step in _steps(part)]
    return [] if normalizer is None else [normalizer]


def _splits(split: pre_tokenizers.PreTokenizer | None) -> list[pre_tokenizers.PreTokenizer]:
    if isinstance(split, pre_tokenizers.Sequence):
        return [step for part in split for step in _splits(part)]
    return [] if split is None else [split]


def layout_of(model: Path) -> str:
    """DEBERTA, ALBERT or the entry of `_FAIRSEQ` that a .model belongs to, by its name and the
    configurations in its folder; empty: its ids are the model's own, and so are its rules."""
    if model.name == "spm.model":
        return DEBERTA
    for file, key in (("tokenizer_config.json", "tokenizer_class"), ("config.json", "model_type")):
        try:
            named = json.loads((model.parent / file).read_text("utf-8"))[key]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        plain = str(named).lower().replace("xlmroberta", "xlm-roberta")
        if prefix := next((name for name in (*_FAIRSEQ, ALBERT) if plain.startswith(name)), ""):
            return prefix
    return ""


def lists_pieces(tokens: Sequence[str]) -> bool:
    """Whether a vocab.txt lists SentencePiece pieces rather than WordPiece tokens."""
    begins = sum(len(token) > 1 and token.startswith(WORD_START) for token in tokens)
    return begins > sum(len(token) > 2 and token.startswith("##") for token in tokens)


def find_sentencepiece_model(vocabulary: Path) -> Path:
    """Finds the SentencePiece model of a vocab.txt that lists its pieces: in the same folder or in
    `subword/`."""
    for folder in (vocabulary.parent, vocabulary.parent / "subword"):
        models = sorted(folder.glob("*.model"))
        if len(models) > 1:
            names = ", ".join(file.name for file in models)
            raise UserError(f"tokenizer {vocabulary}: several .model files ({names}); keep one")
        if models:
            return models[0]
    raise UserError(
        f"tokenizer {vocabulary}: lists SentencePiece pieces ({WORD_START}...), but the model that "
        "splits text into them is missing; put the .model file into the same folder"
    )


def compile_model(
    model: bytes,
    *,
    origin: str,
    single: str = "",
    layout: str = "",
    rules: ClassRules | None = None,
    added: bool = False,
) -> Backend:
    """The tokenizer of a model, with the model's ids; as `layout`, those of `layout_of`, of which
    DEBERTA has a mask token after them. `rules`: those of its class, if they are not the usual
    ones. `added`: whether tokens are added, before which fairseq's models have no white space.
    `single`: characters that are a token each, in the syntax of a regular expression's [...]."""
    proto = _parse(model, origin)
    # Nine digits identify a float32 and survive a round trip through JSON.
    pieces = [(p.piece, float(f"{p.score:.9g}")) for p in proto.pieces]
    unknown = next((p.piece for p in proto.pieces if p.type == _UNKNOWN), None)
    if unknown is None:
        raise UserError(f"tokenizer {origin}: the model has no unknown piece")
    special = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)]
    special += [p.piece for p in proto.pieces if p.piece in _MASKS and p.type != _CONTROL]
    if layout == ALBERT:
        pieces = [(piece, score - 100 * _ends_in_comma(piece)) for piece, score in pieces]
        backend = _backend(proto, pieces, unknown, special, origin=origin)
        return _as_albert(backend, rules if isinstance(rules, AlbertRules) else AlbertRules())
    if layout not in _FAIRSEQ:
        backend = _backend(proto, pieces, unknown, special, origin=origin, single=single)
        if layout == DEBERTA:
            (rules or DebertaRules()).apply(backend)
            backend.add_special_tokens([AddedToken(_MASKS[0], special=True, normalized=False)])
        return backend
    front, replaced = _FAIRSEQ[layout]
    pieces = [*((token, 0.0) for token in front), *pieces[replaced:], ("<mask>", 0.0)]
    special = [*front, *(token for token in special if token not in front)]
    backend = _backend(proto, pieces, "<unk>", special, origin=origin)
    return _as_roberta(_without_spaces(backend) if added else backend)


def _ends_in_comma(piece: str) -> bool:
    """Whether it is a number and a comma, which ALBERT's code splits ("9" "," for "9,")."""
    return len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()


def _as_albert(backend: Backend, rules: AlbertRules) -> Backend:
    """With its steps before the model's own, and any white space as a space."""
    own = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = normalizers.Sequence([*rules.steps(), *own])
    return _without_spaces(backend)


def _without_spaces(backend: Backend) -> Backend:
    """With words as all that is split: white space alone is no token."""
    split: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.WhitespaceSplit()]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, backend.pre_tokenizer])
    return backend


def _as_roberta(backend: Backend) -> Backend:
    """With RoBERTa's mask token and separators."""
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return backend


def is_ernie_m_backend(backend: Backend) -> bool:
    """Whether ERNIE-M's two files say all that determines the ids."""
    if not isinstance(backend.model, models.Unigram) or backend.normalizer is None:
        return False
    tokens = [backend.id_to_token(i) or "" for i in range(len(_ERNIE_M))]
    steps, found = normalizers.Sequence(_ernie_m_steps()), json.loads(backend.to_str())
    known = json.loads(steps.__getstate__())["normalizers"]
    begins = found["normalizer"].get("normalizers", [])[: len(known)]
    return is_ernie_m(tokens) and begins == known


def write_ernie_m(backend: Backend, folder: Path, unlisted: Sequence[Sequence[Any]] = ()) -> None:
    """Write the two files of a tokenizer that `is_ernie_m_backend`: vocab.txt, and a SentencePiece
    model with its pieces and the `unlisted` ones."""
    from sentencepiece import sentencepiece_model_pb2 as schema

    state = json.loads(backend.to_str())
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    tokens = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size())]
    proto = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.trainer_spec.model_type = _UNIGRAM
    proto.trainer_spec.bos_id = proto.trainer_spec.eos_id = proto.trainer_spec.pad_id = -1
    proto.pieces.add(piece="<unk>", score=0.0, type=_UNKNOWN)
    for piece, score in [*state["model"]["vocab"], *unlisted]:
        if piece not in special:
            proto.pieces.add(piece=piece, score=score + 100 * _ends_in_comma(piece))
    own = state["normalizer"]["normalizers"][len(_ernie_m_steps()) :]
    charsmap = [step["precompiled_charsmap"] for step in own if step["type"] == "Precompiled"]
    proto.normalizer_spec.precompiled_charsmap = base64.b64decode("".join(charsmap))
    proto.normalizer_spec.remove_extra_whitespaces = any(step["type"] == "Strip" for step in own)
    proto.normalizer_spec.add_dummy_prefix = state["pre_tokenizer"]["prepend_scheme"] == "always"
    (folder / ERNIE_M_MODEL).write_bytes(proto.SerializeToString())
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")


def unlisted_pieces(model: bytes, tokens: Sequence[str], origin: str) -> list[tuple[str, float]]:
    """The pieces of a model that a vocab.txt lacks, and their scores: ERNIE tiny's tokenizer splits
    texts into them, too, and makes them unknown. Raises UserError if they are more than a few."""
    proto = _parse(model, origin)
    without, listed = (_UNKNOWN, _CONTROL, _UNUSED), set(tokens)
    usual = [p for p in proto.pieces if p.type not in without]
    missing = [(p.piece, float(f"{p.score:.9g}")) for p in usual if p.piece not in listed]
    most = _MAX_UNLISTED_SHARE * len(usual) if proto.trainer_spec.model_type == _UNIGRAM else 0
    if len(missing) > most:
        raise UserError(
            f"tokenizer {origin}: {len(missing):,} pieces of its SentencePiece model are not "
            f"listed, such as {min(missing)[0]!r}; the model belongs to another vocabulary"
        )
    return missing


def with_pieces(backend: Backend, pieces: Sequence[Sequence[Any]], where: str) -> Backend:
    """A unigram tokenizer with further pieces and their scores, after its own. Raises UserError for
    another one."""
    if not pieces:
        return backend
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "Unigram":
        raise UserError(f"{where}: {UNLISTED}: not of a unigram model")
    state["model"]["vocab"] += [list(pair) for pair in pieces]
    with library_errors(where):
        made = Backend.from_str(json.dumps(state))
    made.encode_special_tokens = backend.encode_special_tokens
    return made


def compile_listed(
    model: bytes,
    tokens: Sequence[str],
    unknown: str,
    special: Sequence[str],
    *,
    origin: str,
    lower: bool,
) -> Backend:
    """The tokenizer of a model with the ids of a vocab.txt, whose lines are `tokens`. ERNIE-M's
    has its rules, and is never lower-cased."""
    proto = _parse(model, origin)
    scores = {p.piece: float(f"{p.score:.9g}") for p in proto.pieces}
    least = min(scores.values())
    pieces = [(token, scores.get(token, least)) for token in tokens]
    own = {p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)}
    special = [*special, *sorted(own & set(tokens) - set(special))]
    if is_ernie_m(tokens):
        pieces = [(piece, score - 100 * _ends_in_comma(piece)) for piece, score in pieces]
        return _as_ernie_m(_backend(proto, pieces, unknown, special, origin=origin))
    return _backend(proto, pieces, unknown, special, origin=origin, lower=lower)


def is_ernie_m(tokens: Sequence[str]) -> bool:
    """Whether a vocab.txt is ERNIE-M's."""
    return tuple(tokens[: len(_ERNIE_M)]) == _ERNIE_M


def _ernie_m_steps() -> list[normalizers.Normalizer]:
    """Quotation marks and dashes are made alike, control characters removed, and white space."""
    return [
        *(normalizers.Replace(old, new) for old, new in _ERNIE_M_ALIKE.items()),
        normalizers.Replace(Regex(_CONTROL_CHARACTERS), ""),
        normalizers.Replace(Regex(r"[\t\n\r\p{Zs}]"), " "),
    ]


def _as_ernie_m(backend: Backend) -> Backend:
    """With what its code does before the model sees a text, and two separators between texts."""
    backend.normalizer = normalizers.Sequence([*_ernie_m_steps(), backend.normalizer])
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=ends
    )
    return backend


def _backend(
    proto,
    pieces: Sequence[tuple[str, float]],
    unknown: str,
    special: Sequence[str],
    *,
    origin: str,
    single: str = "",
    lower: bool = False,
) -> Backend:
    with library_errors(f"tokenizer {origin}: not a SentencePiece model"):
        backend = Backend(_model(proto, pieces, unknown, origin))
        backend.normalizer = _normalizer(proto.normalizer_spec, lower)
    scheme = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
    metaspace = pre_tokenizers.Metaspace(
        replacement=WORD_START,
        prepend_scheme=scheme,
        split=proto.trainer_spec.split_by_whitespace,  # without, a piece may have several words
    )
    backend.pre_tokenizer = _split_single(metaspace, single) if single else metaspace
    backend.decoder = decoders.Metaspace(replacement=WORD_START, prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return backend


def _parse(model: bytes, origin: str):
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(model)
    except Exception as error:  # protobuf's DecodeError has no stable import path
        raise UserError(f"tokenizer {origin}: not a SentencePiece model: {error}") from None
    if not proto.pieces:
        raise UserError(f"tokenizer {origin}: not a SentencePiece model: it has no pieces")
    for piece in proto.pieces:
        if len(piece.piece) > _MAX_PIECE_LENGTH or not math.isfinite(piece.score):
            shown = printable(piece.piece[:40])
            raise UserError(f"tokenizer {origin}: not a SentencePiece model: piece {shown!r}")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(
            f"tokenizer {origin}: its pieces end in spaces (treat_whitespace_as_suffix), which is "
            "not supported; train it without"
        )
    if table := proto.normalizer_spec.precompiled_charsmap:
        check_charsmap(table, f"tokenizer {origin}: precompiled_charsmap")
    return proto


def _model(proto, pieces: Sequence[tuple[str, float]], unknown: str, origin: str) -> models.Model:
    known = {piece: i for i, (piece, _) in enumerate(pieces)}
    kind, fallback = proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback
    if kind == _UNIGRAM:
        return models.Unigram(list(pieces), known[unknown], fallback)
    if kind == _BPE:
        merges = _merges([p.piece for p in proto.pieces])
        return models.BPE(known, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    raise UserError(
        f"tokenizer {origin}: SentencePiece model type {kind} is not supported; unigram and BPE are"
    )


def _merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """BPE merges in SentencePiece's order: the pair that makes the piece of the lowest id first."""
    rank = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(a, b) for a, b in pairs if a in rank and b in rank]
        merges += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def _normalizer(spec, lower: bool) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Strip(left=True, right=True))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return normalizers.Sequence(steps)


def _split_single(metaspace: pre_tokenizers.Metaspace, single: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            metaspace,
            pre_tokenizers.Split(Regex(f"{WORD_START}(?=[{single}])"), "removed"),
            pre_tokenizers.Split(Regex(f"[{single}]"), "isolated"),
        ]
    )
