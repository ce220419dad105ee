"""Trains tokenizers deterministically: the same texts give the same bytes.

The WordPiece trainer of the `tokenizers` library numbers its "##" characters in the order of a hash
table that changes from process to process, and breaks ties by these numbers. Here the words are
counted first, their non-initial characters are replaced by characters of a private Unicode plane,
and the plain BPE trainer, which sorts its alphabet, gives the same merges every time.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from palm_ds.common.errors import UserError, first_line, suggest
from palm_ds.text.tokenizer import CHINESE, SPECIALS, Tokenizer, sentencepiece, wordpiece
from palm_ds.text.words import split_words

KINDS = ("wordpiece", "sentencepiece")
_PRIVATE = 0xF0000  # first code point used for non-initial characters
_MIN_COUNT = 2  # least occurrences of a word or character
_FEED = 1 << 16  # characters per string given to the trainer
_MAX_LINE_LENGTH = 2000  # characters; SentencePiece skips lines over about 4,000 bytes
_MAX_BYTES = 10  # of a character: a rare Chinese one, between two delimiters
_MAX_WORD_LENGTH = 50  # characters
_MAX_TOKENS = 10_000_000


def train_tokenizer(
    texts: Iterable[str], *, kind: str, vocab_size: int, lower: bool = True
) -> Tokenizer:
    """Trains a WordPiece or SentencePiece (unigram) tokenizer of at most `vocab_size` tokens, in
    which each Chinese character is a token."""
    check_training(kind, vocab_size)
    if kind == "wordpiece":
        return _train_wordpiece(texts, vocab_size, lower)
    return _train_sentencepiece(texts, vocab_size, lower)


def check_training(kind: str, vocab_size: int) -> None:
    """Raises UserError for a kind or a size of vocabulary that cannot be trained."""
    if kind not in KINDS:
        raise UserError(f"--train {kind!r}: unknown{suggest(kind, KINDS)}")
    if vocab_size < 100:
        raise UserError(f"--vocab_size {vocab_size}: must be at least 100")
    if vocab_size > _MAX_TOKENS:  # the libraries take memory for all of them first
        raise UserError(f"--vocab_size {vocab_size}: must be at most {_MAX_TOKENS:,}")


def _train_wordpiece(texts: Iterable[str], vocab_size: int, lower: bool) -> Tokenizer:
    counts = _count_words(texts, lower)
    letters = _alphabet(counts, (vocab_size - len(SPECIALS)) * 3 // 4)
    inner = {letter: chr(_PRIVATE + i) for i, letter in enumerate(sorted(letters))}
    outer = {private: letter for letter, private in inner.items()}
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS), min_frequency=_MIN_COUNT, show_progress=False
    )
    backend.train_from_iterator(_feed(counts, inner), trainer)
    known = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [
        ("##" if token[0] in outer else "") + "".join(outer.get(c, c) for c in token)
        for token, _ in known
    ]
    specials = [token for token in SPECIALS if token not in tokens]
    return wordpiece([*specials, *tokens][:vocab_size], lower=lower)


def _count_words(texts: Iterable[str], lower: bool) -> Counter[str]:
    """The frequency of each word, as normalized and split by BERT."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(split_words(text))
    normalize = normalizers.BertNormalizer(lowercase=lower).normalize_str
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    counts: Counter[str] = Counter()
    for word, n in raw.items():
        for piece, _ in split(normalize(word)):
            counts[piece] += n
    if not counts:
        raise UserError("no words to train a tokenizer on")
    return counts


def _alphabet(counts: Counter[str], most: int) -> set[str]:
    """The `most` most frequent characters, without rare ones."""
    letters: Counter[str] = Counter()
    for word, n in counts.items():
        for letter in word:
            letters[letter] += n
    ranked = sorted(letters.items(), key=lambda entry: (-entry[1], entry[0]))
    private = range(_PRIVATE, 0x110000)
    kept = [c for c, n in ranked if n >= _MIN_COUNT and ord(c) not in private]
    return set(kept[:most])


def _feed(counts: Counter[str], inner: dict[str, str]) -> Iterator[str]:
    """Every word repeated by its frequency, with non-initial characters in the private plane."""
    for word in sorted(counts):
        if (
            counts[word] < _MIN_COUNT
            or len(word) > _MAX_WORD_LENGTH
            or not all(c in inner for c in word)
        ):
            continue
        written = word[0] + "".join(inner[c] for c in word[1:]) + " "
        at_once = max(1, _FEED // len(written))
        for done in range(0, counts[word], at_once):
            yield written * min(at_once, counts[word] - done)


def _train_sentencepiece(texts: Iterable[str], vocab_size: int, lower: bool) -> Tokenizer:
    import sentencepiece as spm

    model = io.BytesIO()
    pad, unk, cls, sep, mask = SPECIALS
    try:
        spm.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=0.9998,
            normalization_rule_name="nmt_nfkc_cf" if lower else "nmt_nfkc",
            pretokenization_delimiter=_DELIMITER,
            max_sentence_length=_MAX_BYTES * _MAX_LINE_LENGTH,
            num_threads=4,  # fixed, so that sums are in the same order on every machine
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=pad,
            unk_piece=unk,
            bos_piece=cls,
            eos_piece=sep,
            control_symbols=[mask],
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)  # of an error of `texts`, the others are where it was raised
        raise UserError(f"--train sentencepiece, --vocab_size {vocab_size}: {reason}") from None
    return sentencepiece(model.getvalue(), origin="trained", chinese=True)


_DELIMITER = "\u2063"  # an invisible separator: no piece crosses it


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines short enough for the trainer, with delimiters around Chinese characters."""
    import re

    han = re.compile(f"([{CHINESE}])")
    for text in texts:
        for line in text.replace(_DELIMITER, "").replace("\0", "").split("\n"):
            for start in range(0, len(line), _MAX_LINE_LENGTH):
                piece = line[start : start + _MAX_LINE_LENGTH].strip()
                if piece:
                    yield han.sub(f"{_DELIMITER}\\1{_DELIMITER}", piece)
