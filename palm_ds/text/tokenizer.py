"""WordPiece and SentencePiece behind one small interface.

Whatever the files were, the work is done by one compiled tokenizer (the `tokenizers` library), so
that ids are the same here and under `transformers.AutoTokenizer` on the folder that `save` writes.
Training one is in `palm_ds.text.train_tokenizer`.

    tokenizer = load_tokenizer("vocab.txt")          # BERT or ERNIE vocab.txt, tokenizer.json,
    tokenizer.encode_words(["unbelievable"])         # spiece.model, or a folder holding one
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.text.sentencepiece_model import compile_listed, compile_model, find_model, lists_pieces

if TYPE_CHECKING:
    from palm_ds.text.tokens import SpecialTokens

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_NOT_REGULAR = re.compile(r"\[unused\d+\]|<unused_?\d+>|<extra_id_\d+>|<0x[0-9A-F]{2}>")
_SPECIAL, _CAPITAL = re.compile(r"\[.+\]|<.+>"), re.compile("[A-Z]")
# The ideographs that BERT takes to be a word each (`handle_chinese_chars`), inside a [...].
CHINESE = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b81f"
    "\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f"
)
_SENTENCEPIECE_NAMES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


class Tokenizer:
    """Text to ids and back. `origin` is what messages call it: a path, or "trained"."""

    def __init__(self, backend: Backend, *, origin: str = "trained") -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "[MASK]" in a text is text, never the token
        self.backend = backend
        self.origin = origin
        self.roles = {role: _find_role(role, self._known, origin) for role in _ROLES}
        if backend.post_processor is None:
            backend.post_processor = _template(self.roles, self._known)

    def __reduce__(self) -> tuple:
        return _from_text, (self.backend.to_str(), self.origin)

    @cached_property
    def _known(self) -> dict[str, int]:
        """Token -> id."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def kind(self) -> str:
        """wordpiece, or the lower-case name of the model in tokenizer.json."""
        return type(self.backend.model).__name__.lower()

    @cached_property
    def lower(self) -> bool:
        """Whether capitals are lost on the way in."""
        normalizer = self.backend.normalizer
        return normalizer is not None and "A" not in normalizer.normalize_str("A")

    @cached_property
    def by_word(self) -> bool:
        """Whether white space and every character of punctuation end a token, as in BERT: then
        words may be encoded one by one and the result is that of the whole text."""
        return isinstance(self.backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer) and (
            self.backend.normalizer is None
            or isinstance(self.backend.normalizer, normalizers.BertNormalizer)
        )

    @cached_property
    def vocabulary(self) -> SpecialTokens:
        """The ids that tasks need to know."""
        from palm_ds.text.tokens import SpecialTokens

        ids = {role: self._known[token] for role, token in self.roles.items()}
        return SpecialTokens(size=self.size, regular=self._regular(), **ids)

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._known.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids of a text."""
        state = json.loads(self.backend.to_str())
        state.pop("post_processor", None)
        canonical = json.dumps(state, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _regular(self) -> np.ndarray:
        special = set(self.roles.values())
        added = self.backend.get_added_tokens_decoder().values()
        special |= {token.content for token in added if token.special}
        tokens = ((t, i) for t, i in self._known.items() if t not in special)
        return np.array(sorted(i for t, i in tokens if not _NOT_REGULAR.fullmatch(t)), np.int64)

    @cached_property
    def _plain(self) -> np.ndarray:
        """(size,) each id, but [UNK] for a special one: a unigram model would find the letters of
        "[MASK]" in a text to be the token."""
        added = self.backend.get_added_tokens_decoder().items()
        plain = np.arange(self.size)
        plain[[i for i, token in added if token.special]] = self._known[self.roles["unk"]]
        return plain

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each word, encoded by itself, without special tokens."""
        return [ids.tolist() for ids, _ in self.encode_texts(words)]

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids (int64) and the character at which each token begins (int64).
        Special tokens are neither added nor found in the text."""
        return [(ids, spans[:, 0]) for ids, spans in self.encode_spans(texts)]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids (int64) and (tokens, 2) the characters [from, to) of each token.
        Special tokens are neither added nor found in the text."""
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (
                self._plain[np.array(encoding.ids, np.int64)],
                np.array(encoding.offsets, np.int64).reshape(-1, 2),
            )
            for encoding in encodings
        ]

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Readable text of the ids."""
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special)

    def tokens(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The token of each id, as it stands in the vocabulary; an id without one is `<id>`."""
        at = self.backend.id_to_token
        return [at(int(i)) or f"<{int(i)}>" for i in ids]

    def save(self, folder: str | Path) -> None:
        """Writes files that `transformers.AutoTokenizer.from_pretrained(folder)` opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), "utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": token for role, token in self.roles.items()},
            "do_lower_case": self.lower,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        }
        write_json(folder / "tokenizer_config.json", config)
        if self.kind == "wordpiece":
            lines = "".join(token + "\n" for token in self.tokens(range(self.size)))
            (folder / "vocab.txt").write_text(lines, "utf-8")


def _from_text(text: str, origin: str) -> Tokenizer:
    return Tokenizer(Backend.from_str(text), origin=origin)


def _find_role(role: str, known: dict[str, int], origin: str) -> str:
    for token in _ROLES[role]:
        if token in known:
            return token
    wanted = " or ".join(_ROLES[role])
    raise UserError(f"{origin}: the vocabulary has no {wanted} token ({role}); add one")


def _template(roles: dict[str, str], known: dict[str, int]) -> processors.TemplateProcessing:
    cls, sep = roles["cls"], roles["sep"]
    return processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, known[cls]), (sep, known[sep])],
    )


def load_tokenizer(path: str | Path, *, lower: bool | None = None) -> Tokenizer:
    """A vocab.txt, a tokenizer.json, a SentencePiece .model, or a folder with one of them. A
    vocab.txt that lists SentencePiece's pieces needs the .model beside it.

    `lower` is for vocab.txt alone, which does not say it: None lower-cases where no token of the
    vocabulary holds a capital letter A to Z.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder")
    if path.is_dir():
        file = _find_file(path)
        lower = _configured_lower(path) if lower is None else lower
    else:
        file = path
    if file.suffix == ".json":
        return _load_json(file)
    if file.suffix == ".txt":
        return _load_vocabulary(file, lower)
    if file.suffix == ".model":
        return sentencepiece(_read_bytes(file), origin=str(file))
    raise UserError(
        f"tokenizer {file}: unknown kind of file; give vocab.txt, tokenizer.json, a SentencePiece "
        ".model, or a folder with one of them"
    )


def _find_file(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.txt", *_SENTENCEPIECE_NAMES):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"tokenizer {folder}: holds no tokenizer.json, vocab.txt or spiece.model")


def _configured_lower(folder: Path) -> bool | None:
    """`do_lower_case` of a Hugging Face folder, where it says so."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text("utf-8")).get("do_lower_case")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a JSON object: {error}") from None
    return value if isinstance(value, bool) else None


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer {file}: cannot be read: {error.strerror}") from None


def _read_text(file: Path) -> str:
    data = _read_bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"tokenizer {file}: line {line}: not UTF-8 text") from None


def _load_json(file: Path) -> Tokenizer:
    text = _read_text(file)
    try:
        state = json.loads(text)
    except ValueError as error:
        raise UserError(f"tokenizer {file}: not JSON: {error}") from None
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"tokenizer {file}: not a tokenizer.json: it has no key `model`")
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(f"tokenizer {file}: not a tokenizer.json: {reason}") from None
    return Tokenizer(backend, origin=str(file))


def _read_vocabulary(file: Path) -> list[str]:
    """One token a line; ERNIE's files add a tab and the id, which must be the line's number."""
    lines = _read_text(file).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    seen: dict[str, int] = {}
    for number, line in enumerate(lines):
        token, tab, given = line.partition("\t")
        if not token:
            raise UserError(f"tokenizer {file}: line {number + 1} is empty; one token a line")
        if tab and given.strip() != str(number):
            raise UserError(
                f"tokenizer {file}: line {number + 1}: id {given.strip()!r} where {number} is due"
            )
        if token in seen:
            first = seen[token] + 1
            raise UserError(
                f"tokenizer {file}: line {number + 1}: {token!r} stands on line {first} already"
            )
        seen[token] = number
    if not seen:
        raise UserError(f"tokenizer {file}: empty; one token a line")
    return list(seen)


def _load_vocabulary(file: Path, lower: bool | None) -> Tokenizer:
    """A vocab.txt of WordPiece's tokens, or of SentencePiece's with the model beside it."""
    tokens = _read_vocabulary(file)
    if not lists_pieces(tokens):
        return wordpiece(tokens, lower=lower, origin=str(file))
    known, origin = {token: i for i, token in enumerate(tokens)}, str(file)
    backend = compile_listed(
        _read_bytes(find_model(file)),
        tokens,
        origin=origin,
        unknown=_find_role("unk", known, origin),
        special=[_find_role(role, known, origin) for role in _ROLES],
        lower=_loses_capitals(tokens) if lower is None else lower,
    )
    return Tokenizer(backend, origin=origin)


def _loses_capitals(tokens: Sequence[str]) -> bool:
    """Whether no token holds a capital letter A to Z."""
    return not any(_CAPITAL.search(t) for t in tokens if not _SPECIAL.fullmatch(t))


def wordpiece(tokens: Sequence[str], *, lower: bool | None, origin: str = "trained") -> Tokenizer:
    """BERT's tokenizer over this vocabulary; one Chinese character a token."""
    if lower is None:
        lower = _loses_capitals(tokens)
    known = {token: i for i, token in enumerate(tokens)}
    specials = [_find_role(role, known, origin) for role in _ROLES]
    unk = _find_role("unk", known, origin)
    backend = Backend(models.WordPiece(known, unk_token=unk, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return Tokenizer(backend, origin=origin)


def sentencepiece(model: bytes, *, origin: str, chinese: bool = False) -> Tokenizer:
    """A SentencePiece unigram or BPE model, as one compiled tokenizer.

    `chinese`: every Chinese character is a token of its own (models trained here; a model from
    elsewhere keeps its own pieces).
    """
    single = CHINESE if chinese else ""
    return Tokenizer(compile_model(model, origin=origin, single=single), origin=origin)
