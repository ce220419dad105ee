"""WordPiece and SentencePiece tokenizers behind one small interface.

Every file format becomes one compiled tokenizer of the `tokenizers` library, so ids are the same
here and with `transformers.AutoTokenizer` on the folder that `save` writes. For training one see
`palm_ds.text.train_tokenizer`.

    tokenizer = load_tokenizer("vocab.txt")          # BERT or ERNIE vocab.txt, tokenizer.json,
    tokenizer.encode_words(["unbelievable"])         # spiece.model, or a folder holding one
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from palm_ds.common.config import unique_keys
from palm_ds.common.errors import UserError
from palm_ds.common.files import hash_of_text
from palm_ds.common.json_files import write_json
from palm_ds.text.byte_level_bpe import VOCABULARY, as_tokenizer_json
from palm_ds.text.check_tokenizer_json import (
    check_tokenizer_state,
    errors_in_texts,
    library_errors,
    may_run_away,
    without_panics,
)
from palm_ds.text.custom_tokenizer import (
    KEY,
    TextSplitter,
    compile_vocabulary,
    find_splitter,
    normalized,
)
from palm_ds.text.sentencepiece_model import (
    UNLISTED,
    compile_listed,
    compile_model,
    find_sentencepiece_model,
    layout_of,
    lists_pieces,
    unlisted_pieces,
    with_pieces,
)
from palm_ds.text.tokenizer_settings import (
    ROLE_TOKENS,
    KeptSettings,
    TokenizerSettings,
    add_settings_tokens,
    apply_settings,
    bert_normalizer,
    bert_template,
    class_rules,
    find_role,
    joins_pairs,
    normalization,
    read_settings,
    roles_in,
    separate_texts,
)
from palm_ds.text.vocabulary_file import loses_capitals, read_bytes, read_text, read_vocabulary
from palm_ds.text.word_segmenter import (
    CHARACTERS,
    WordSegmenter,
    compile_characters,
    find_word_segmenter,
    in_text,
)

if TYPE_CHECKING:
    from palm_ds.text.tokens import SpecialTokens

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NOT_REGULAR = re.compile(r"\[unused\d+\]|\[UNUSED\]|<unused_?\d+>|<extra_id_\d+>|<0x[0-9A-F]{2}>")
# The ideographs that BERT treats as a word each (`handle_chinese_chars`), for use inside [...].
CHINESE = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b81f"
    "\U0002b920-\U0002ceaf\U0002f800-\U0002fa1f"
)
_PROBE = "A b, \u00e9\u4e00\U0001f600  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"
"""A text that a tokenizer must be able to split: unknown characters are in it."""
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
    *("spm.model", VOCABULARY),
)
"""Files of a tokenizer's folder; the first that is there is read."""
_INNER = ("tokenizer", "weights/tokenizer")
"""The tokenizer's folder in a corpus or in weights, and in a run."""


class Tokenizer:
    """Converts text to ids and back. `origin` names it in messages: a path, or "trained"."""

    def __init__(
        self,
        backend: Backend,
        *,
        origin: str = "trained",
        roles: Mapping[str, str] | None = None,
        kept: KeptSettings | None = None,
        segmenter: WordSegmenter | None = None,
        splitter: TextSplitter | None = None,
    ) -> None:
        """`roles`: {role: token} where the usual tokens are not it. `kept`: what is saved with it;
        by default the limits of `backend`. `segmenter`: splits texts into words before.
        `splitter`: of the user's own, splits texts into tokens instead of the backend."""
        self.kept = kept or KeptSettings(padding=backend.padding, truncation=backend.truncation)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "[MASK]" in a text is text, never the token
        self.backend, self.segmenter, self.splitter = backend, segmenter, splitter
        self._unlisted = self.kept.config.get(UNLISTED, [])
        self.origin, self._may_panic = origin, may_run_away(backend)
        given = roles or {}
        self.roles = {
            role: find_role(role, self._known, origin, given.get(role, "")) for role in ROLE_TOKENS
        }
        if backend.post_processor is None:
            backend.post_processor = bert_template(self.roles, self._known)

    def __reduce__(self) -> tuple:
        more = dict(
            roles=self.roles, kept=self.kept, segmenter=self.segmenter, splitter=self.splitter
        )
        return _from_text, (self.backend.to_str(), {"origin": self.origin, **more})

    @cached_property
    def _known(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def kind(self) -> str:
        """The model's name in lower case: wordpiece, unigram, bpe ..."""
        return type(self.backend.model).__name__.lower()

    @cached_property
    def lower(self) -> bool:
        """Whether text is lower-cased."""
        text = normalized("A", self.backend.normalizer)
        return "A" not in ("".join(self.splitter.split(text)[0]) if self.splitter else text)

    @cached_property
    def by_word(self) -> bool:
        """Whether white space and punctuation always end a token, as in BERT: then encoding word by
        word gives the ids of the whole text. Added tokens may have several words."""
        plain = self.backend.normalizer is None or isinstance(
            self.backend.normalizer, normalizers.BertNormalizer
        )
        added = self.backend.get_added_tokens_decoder().values()
        return (
            plain
            and isinstance(self.backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and all(token.special for token in added)
        )

    @cached_property
    def vocabulary(self) -> SpecialTokens:
        """The special token ids that tasks need."""
        from palm_ds.text.tokens import SpecialTokens

        ids: dict[str, Any] = {role: self._known[token] for role, token in self.roles.items()}
        ids |= {"attn": self._known.get("[ATTN]"), "noise": self._known.get("[NOISE]")}
        joined = joins_pairs(self.backend, self.kept)
        return SpecialTokens(size=self.size, regular=self._regular(), **joined, **ids)

    @cached_property
    def size(self) -> int:
        """The largest id plus one."""
        return max(self._known.values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the ids of a text."""
        state = json.loads(self.backend.to_str())
        state.pop("post_processor", None)
        if self.segmenter:
            state["word_segmenter"] = self.segmenter.fingerprint
        if self.splitter:
            state[KEY] = self.splitter.fingerprint
        if self._unlisted:
            state[UNLISTED] = self._unlisted
        canonical = json.dumps(state, sort_keys=True, ensure_ascii=True)
        return hash_of_text(canonical)

    def _regular(self) -> np.ndarray:
        special = set(self.roles.values())
        added = self.backend.get_added_tokens_decoder().values()
        special |= {token.content for token in added if token.special}
        tokens = ((t, i) for t, i in self._known.items() if t not in special)
        return np.array(sorted(i for t, i in tokens if not _NOT_REGULAR.fullmatch(t)), np.int64)

    @cached_property
    def _plain(self) -> np.ndarray:
        """(ids of `_splitter`,) maps special ids to [UNK] and others to themselves: a unigram model
        would take the characters "[MASK]" in a text for the token. So are pieces that vocab.txt
        lacks, which are between the model's own and added tokens."""
        added = self.backend.get_added_tokens_decoder().items()
        plain, unknown = np.arange(self.size), self._known[self.roles["unk"]]
        plain[[i for i, token in added if token.special]] = unknown
        own = self.backend.get_vocab_size(with_added_tokens=False)
        return np.insert(plain, own, [unknown] * len(self._other_pieces))

    @cached_property
    def _other_pieces(self) -> list[Sequence[Any]]:
        """Pieces that vocab.txt lacks, and their scores; those that were added are tokens."""
        return [pair for pair in self._unlisted if pair[0] not in self._known]

    @cached_property
    def _splitter(self) -> Backend:
        """Splits texts into the pieces that vocab.txt lacks, too."""
        return with_pieces(self.backend, self._other_pieces, f"tokenizer {self.origin}")

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each word encoded separately, without special tokens."""
        return [ids.tolist() for ids, _ in self.encode_texts(words)]

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids (int64) and the start character of each token (int64). Special
        tokens are neither added nor recognized in the text."""
        return [(ids, spans[:, 0]) for ids, spans in self.encode_spans(texts)]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids (int64) and (tokens, 2) the characters [start, end) of each token.
        Special tokens are neither added nor recognized in the text."""
        if self.splitter:
            return [self._split(text, self.splitter) for text in texts]
        prepared = [self.segmenter.prepare(text) for text in texts] if self.segmenter else []
        given = [text for text, _ in prepared] if self.segmenter else list(texts)
        where = f"tokenizer {self.origin}: cannot split a text into tokens"
        with without_panics(applies=self._may_panic), errors_in_texts(texts, where):
            encodings = self._splitter.encode_batch(given, add_special_tokens=False)
        spans = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
        if self.segmenter:
            spans = [in_text(span, at) for span, (_, at) in zip(spans, prepared, strict=True)]
        ids = [self._plain[np.array(encoding.ids, np.int64)] for encoding in encodings]
        return list(zip(ids, spans, strict=True))

    def _split(self, text: str, splitter: TextSplitter) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text and the characters of its tokens, by the user's own class."""
        tokens, spans = splitter.split(normalized(text, self.backend.normalizer))
        unknown = self._known[self.roles["unk"]]
        ids = np.array([self._known.get(token, unknown) for token in tokens], np.int64)
        return self._plain[ids], spans

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """The text of the ids."""
        if self.splitter:
            special = {self._known[token] for token in self.roles.values()} if skip_special else ()
            return self.splitter.made.join(
                self.tokens([i for i in map(int, ids) if i not in special])
            )
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special)

    def tokens(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The vocabulary entry of each id; `<id>` for an id that has none."""
        at = self.backend.id_to_token
        return [at(int(i)) or f"<{int(i)}>" for i in ids]

    def save(self, folder: str | Path) -> None:
        """Writes files that `transformers.AutoTokenizer.from_pretrained(folder)` opens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._limited().to_str(pretty=True), "utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": token for role, token in self.roles.items()},
            **normalization(self.backend, lower=self.lower),
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **self.kept.config,
            **(self.segmenter.save(folder) if self.segmenter else {}),
            **(self.splitter.save(folder) if self.splitter else {}),
        }
        write_json(folder / "tokenizer_config.json", config)
        if self.kind == "wordpiece" and not self.has_line_breaks:
            lines = "".join(token + "\n" for token in self.tokens(range(self.size)))
            (folder / "vocab.txt").write_text(lines, "utf-8")

    @property
    def has_line_breaks(self) -> bool:
        """Whether there is one in a token: in a vocab.txt the ids after it would be others."""
        return any("\n" in token or "\r" in token for token in self._known)

    def of_length(self, tokens: int) -> Tokenizer:
        """The same for an encoder with this maximum length."""
        kept = replace(self.kept, config={**self.kept.config, "model_max_length": tokens})
        return self.changed(self.backend, kept)

    def changed(
        self,
        backend: Backend,
        kept: KeptSettings | None = None,
        segmenter: WordSegmenter | None = None,
    ) -> Tokenizer:
        """The same with another backend, or with other limits, or another way to split words."""
        return Tokenizer(
            backend,
            origin=self.origin,
            roles=self.roles,
            kept=kept or self.kept,
            segmenter=segmenter or self.segmenter,
            splitter=self.splitter,
        )

    def with_splitter(self, splitter: TextSplitter) -> Tokenizer:
        """The same vocabulary with a class of the user's own that splits texts."""
        return Tokenizer(
            self.backend, origin=self.origin, roles=self.roles, kept=self.kept, splitter=splitter
        )

    def _limited(self) -> Backend:
        """The backend with the padding and truncation that its file had."""
        if not (self.kept.padding or self.kept.truncation):
            return self.backend
        backend = Backend.from_str(self.backend.to_str())
        if self.kept.padding:
            backend.enable_padding(**self.kept.padding)
        if self.kept.truncation:
            backend.enable_truncation(**self.kept.truncation)
        return backend


def _from_text(text: str, more: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(text), **more)


def load_tokenizer(path: str | Path, *, lower: bool | None = None) -> Tokenizer:
    """Loads a vocab.txt, tokenizer.json, SentencePiece .model or vocab.json (with merges.txt next
    to it), or a folder with one. A vocab.txt of SentencePiece pieces needs the .model there too.

    `lower` applies only to vocab.txt, which does not record it. None means lower-case if no token
    of the vocabulary contains a capital letter A to Z.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder")
    file = _find_file(path) if path.is_dir() else path
    settings = read_settings(path) if path.is_dir() else TokenizerSettings()
    if splitter := find_splitter(path, settings.custom):
        return _load_custom(file, settings, splitter)
    if file.suffix == ".model":
        return _load_model(file, settings)
    if file.suffix == ".json":
        return _load_json(file, settings)
    if file.suffix == ".txt":
        settings = settings if lower is None else replace(settings, lower=lower)
        return _load_vocabulary(file, settings)
    raise UserError(
        f"tokenizer {file}: unknown file type; give vocab.txt, tokenizer.json, a SentencePiece "
        ".model, or a folder with one of them"
    )


def segmenter_in(folder: Path) -> WordSegmenter | None:
    """Segmenter with which the tokenizer of a folder splits a text into words first; None: it does
    not."""
    settings = read_settings(folder)
    found = find_word_segmenter(folder, settings.word_segmenter)
    return found and replace(found, simplify=settings.simplify)


def _find_file(folder: Path) -> Path:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            return folder / name
    inner = next((path for part in _INNER if (path := folder / part).is_dir()), None)
    hint = f'; did you mean "{inner}"?' if inner else ""
    raise UserError(f"tokenizer {folder}: contains no {', '.join(TOKENIZER_FILES)}{hint}")


def _load_json(file: Path, settings: TokenizerSettings) -> Tokenizer:
    text = as_tokenizer_json(file, settings) if file.name == VOCABULARY else read_text(file)
    try:
        state = json.loads(text, object_pairs_hook=partial(unique_keys, f"tokenizer {file}"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"tokenizer {file}: not JSON: {error}") from None
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"tokenizer {file}: not a tokenizer.json: it has no key `model`")
    check_tokenizer_state(state, f"tokenizer {file}")
    with library_errors(f"tokenizer {file}: not a tokenizer.json"):
        backend = Backend.from_str(text)
    apply_settings(backend, settings)
    segmenter = segmenter_in(file.parent) if settings.word_segmenter else None
    tokenizer = _configured(backend, settings, str(file), segmenter)
    tokenizer.encode_texts([_PROBE])
    return tokenizer


def _load_model(file: Path, settings: TokenizerSettings) -> Tokenizer:
    """Loads a SentencePiece model, whose ids and rules are those of its folder's class."""
    layout = layout_of(file)
    backend = compile_model(
        read_bytes(file),
        origin=str(file),
        layout=layout,
        rules=class_rules(file.parent, layout),
        added=any(not token.special for token in settings.tokens.values()),
    )
    return _configured(backend, settings, str(file))


def _load_custom(file: Path, settings: TokenizerSettings, splitter: TextSplitter) -> Tokenizer:
    """Loads the vocabulary of a tokenizer of the user's own."""
    if file.suffix == ".json":
        return _load_json(file, settings).with_splitter(splitter)
    if file.suffix != ".txt":
        raise UserError(f"{splitter.where}: the vocabulary must be vocab.txt or tokenizer.json")
    tokens, origin = read_vocabulary(file), str(file)
    known = {token: i for i, token in enumerate(tokens)}
    roles = roles_in(settings, known)
    special = [find_role(role, known, origin, roles.get(role, "")) for role in ROLE_TOKENS]
    unknown = special[list(ROLE_TOKENS).index("unk")]
    backend = compile_vocabulary(tokens, unknown=unknown, special=special)
    return _configured(backend, settings, origin).with_splitter(splitter)


def _configured(
    backend: Backend,
    settings: TokenizerSettings,
    origin: str,
    segmenter: WordSegmenter | None = None,
) -> Tokenizer:
    """With the special and added tokens of the settings, and what is saved unchanged."""
    add_settings_tokens(backend, settings, f"tokenizer {origin}")
    kept = replace(settings.kept, padding=backend.padding, truncation=backend.truncation)
    roles = roles_in(settings, backend.get_vocab(with_added_tokens=True))
    return Tokenizer(backend, origin=origin, roles=roles, kept=kept, segmenter=segmenter)


def _load_vocabulary(file: Path, settings: TokenizerSettings) -> Tokenizer:
    """Loads a vocab.txt of WordPiece tokens, or of SentencePiece pieces with its model."""
    tokens = read_vocabulary(file)
    lower = settings.lower
    if settings.unknown:
        raise UserError(
            f"tokenizer {file}: is of a {settings.unknown}, whose rules are not known here; save a "
            "tokenizer.json next to it"
        )
    if not lists_pieces(tokens):
        backend = _wordpiece(tokens, settings, str(file))
        separate_texts(backend, settings)
        return _configured(backend, settings, str(file))
    known, origin = {token: i for i, token in enumerate(tokens)}, str(file)
    segmenter = find_word_segmenter(file.parent, settings.word_segmenter)
    if lower is None:  # ERNIE tiny always is, although its model has seen capitals
        lower = bool(segmenter or settings.word_segmenter) or loses_capitals(tokens)
    roles = roles_in(settings, known)
    special = [find_role(role, known, origin, roles.get(role, "")) for role in ROLE_TOKENS]
    unknown = special[list(ROLE_TOKENS).index("unk")]
    if settings.word_segmenter == CHARACTERS:
        backend = compile_characters(tokens, unknown=unknown, special=special, lower=lower)
        return _configured(backend, settings, origin)
    model = read_bytes(find_sentencepiece_model(file))
    missing = [list(pair) for pair in unlisted_pieces(model, tokens, origin)]
    backend = compile_listed(model, tokens, unknown, special, origin=origin, lower=lower)
    more = {UNLISTED: missing} if missing else {}
    kept = replace(settings.kept, config={**settings.kept.config, **more})
    return _configured(backend, replace(settings, kept=kept), origin, segmenter)


def wordpiece(tokens: Sequence[str], *, lower: bool | None, origin: str = "trained") -> Tokenizer:
    """BERT's tokenizer with this vocabulary; each Chinese character is a token."""
    return Tokenizer(_wordpiece(tokens, TokenizerSettings(lower=lower), origin), origin=origin)


def _wordpiece(tokens: Sequence[str], settings: TokenizerSettings, origin: str) -> Backend:
    lower = loses_capitals(tokens) if settings.lower is None else settings.lower
    known = {token: i for i, token in enumerate(tokens)}
    roles = roles_in(settings, known)
    specials = [find_role(role, known, origin, roles.get(role, "")) for role in ROLE_TOKENS]
    unk = specials[list(ROLE_TOKENS).index("unk")]
    backend = Backend(models.WordPiece(known, unk_token=unk, max_input_chars_per_word=100))
    backend.normalizer = bert_normalizer(settings, lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    return backend


def sentencepiece(model: bytes, *, origin: str, chinese: bool = False) -> Tokenizer:
    """The tokenizer of a SentencePiece unigram or BPE model.

    `chinese` makes every Chinese character a separate token, as in models trained here.
    """
    backend = compile_model(model, origin=origin, single=CHINESE if chinese else "")
    return Tokenizer(backend, origin=origin)
