"""A tokenizer that prepares texts as training did: simplified, lower-cased, with special tokens.

    traditional text ──words──> 乾 of 乾隆 marked ──table──> simplified ──> own rules

A corpus simplifies its texts before they reach the tokenizer. Other programs know the tokenizer
alone, so the one exported to them has OpenCC's conversion among its rules: a table of characters,
and before it the words in which a character is converted otherwise than alone.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

from tokenizers import Encoding, Regex, normalizers, processors
from tokenizers import Tokenizer as Backend

from palm_ds.common.settings import Settings
from palm_ds.text.chinese import find_simplifier
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokenizer_settings import adds_special_tokens, bert_template

_HAN = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x32400))
_PROBE = "A 1, \u00e9\u4e00"
_MARKS = 0xF0000  # private characters that stand for a converted one between the two rules


@dataclass(frozen=True, kw_only=True)
class TextPreparation(Settings):
    """The steps that a run's texts had before they were tokenized."""

    simplify: bool = False
    """Chinese ones were written in simplified characters."""
    lower: bool = False

    def applied_to(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer that does it too (`normalizing_tokenizer`)."""
        return normalizing_tokenizer(tokenizer, simplify=self.simplify, lower=self.lower)


def only_here(tokenizer: Tokenizer) -> list[str]:
    """Notes on steps of a tokenizer that other programs leave out."""
    notes = []
    if tokenizer.segmenter:
        steps = "simplify texts and " * tokenizer.segmenter.simplify + "split texts into words"
        notes.append(f"other programs' tokenizers do not {steps} first; do it before")
    if tokenizer.splitter:
        notes.append(
            f"other programs know the vocabulary but not {tokenizer.splitter.kind}; give them the "
            "tokens of a text joined by spaces"
        )
    return notes


def other_inputs(tokenizer: Tokenizer) -> str:
    """What the tokenizer makes of texts, if models are given something else here; else empty."""
    cls, sep = tokenizer.roles["cls"], tokenizer.roles["sep"]
    between = " ".join([sep] * tokenizer.vocabulary.separators)
    here = f"{cls} A {sep}", f"{cls} A {between} B {sep}"
    encode = tokenizer.backend.encode
    made = _layout(encode(_PROBE)), _layout(encode(_PROBE, _PROBE))
    if made == here or "A" not in made[0].split():  # it knows no character of that text
        return ""
    return (
        f'the tokenizer makes "{made[0]}" of a text A and "{made[1]}" of two, but the model reads '
        f'"{here[0]}" and "{here[1]}" here; its outputs are not those in other programs'
    )


def _layout(encoding: Encoding) -> str:
    """The special tokens around A and B."""
    parts: list[str] = []
    for token, text in zip(encoding.tokens, encoding.sequence_ids, strict=True):
        part = token if text is None else "AB"[text]
        if text is None or parts[-1:] != [part]:
            parts.append(part)
    return " ".join(parts)


def text_tokenizer(tokenizer: Tokenizer, preparation: TextPreparation) -> Tokenizer | None:
    """The tokenizer for texts that are not prepared yet; None if it is the given one."""
    made = preparation.applied_to(tokenizer)
    return None if made.fingerprint == tokenizer.fingerprint else made


def normalizing_tokenizer(
    tokenizer: Tokenizer, *, simplify: bool = False, lower: bool = False
) -> Tokenizer:
    """The tokenizer with these steps before its own, and with the special tokens that training puts
    around texts. Words are split from simplified texts: a segmenter does that."""
    segmenter = tokenizer.segmenter
    if segmenter and simplify:
        segmenter, simplify = replace(segmenter, simplify=True), False
    steps = [
        *(_simplifying_steps() if simplify else []),
        *(_lowering_steps() if lower and not tokenizer.lower else []),
    ]
    others = other_inputs(tokenizer)
    if not steps and segmenter == tokenizer.segmenter and not others:
        return tokenizer
    backend = _matching_after(steps, tokenizer.backend)
    own = [backend.normalizer] if backend.normalizer is not None else []
    if steps:
        backend.normalizer = normalizers.Sequence([*steps, *own])
    if others:
        kept = [] if adds_special_tokens(backend) else [backend.post_processor]
        backend.post_processor = processors.Sequence([*kept, _template(tokenizer)])
    return tokenizer.changed(backend, segmenter=segmenter)


def _template(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """The special tokens that training puts around texts."""
    known, joined = tokenizer.backend.get_vocab(with_added_tokens=True), tokenizer.vocabulary
    return bert_template(
        tokenizer.roles, known, separators=joined.separators, second_type=joined.second_type
    )


def _matching_after(steps: Sequence[normalizers.Normalizer], backend: Backend) -> Backend:
    """A copy that matches added tokens in texts after these steps, as training did: Chinese words
    are matched before a tokenizer's own, which put spaces around each character."""
    state, before = json.loads(backend.to_str()), normalizers.Sequence(list(steps))
    for token in state["added_tokens"]:
        if not token["special"] and before.normalize_str(token["content"]) == token["content"]:
            token["normalized"] |= bool(steps)
    return Backend.from_str(json.dumps(state))


def _lowering_steps() -> list[normalizers.Normalizer]:
    """As corpora are lower-cased: all but the letter that would become two."""
    letter, mark = "\u0130", "\U000ffffd"
    kept = normalizers.Replace(letter, mark), normalizers.Replace(mark, letter)
    return [kept[0], normalizers.Lowercase(), kept[1]]


@cache
def _simplifying_steps() -> tuple[normalizers.Normalizer, ...]:
    """Made once: it takes a sixth of a second."""
    simplify = find_simplifier()
    table: dict[int, int] = {}
    for first, last in _HAN:
        for old in map(chr, range(first, last)):
            if len(new := simplify(old)) == 1 and new != old:
                table[ord(old)] = ord(new)
    marks: dict[tuple[str, str], str] = {}
    words: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for word in _words():
        for at, (old, new) in enumerate(zip(word, simplify(word), strict=True)):
            if chr(table.get(ord(old), ord(old))) != new:
                marks.setdefault((old, new), chr(_MARKS + len(marks)))
                words.setdefault((old, new), []).append((word[: at + 1], word[at + 1 :]))
    steps = [_marking_step(old, mark, words[old, new], marks) for (old, new), mark in marks.items()]
    table |= {ord(mark): ord(new) for (_, new), mark in marks.items()}
    return (*steps, normalizers.Precompiled(_compiled(table)))


def _marking_step(
    old: str, mark: str, words: Sequence[tuple[str, str]], marks: Mapping[tuple[str, str], str]
) -> normalizers.Normalizer:
    """Replaces a character by its mark in these words, given up to it and after it. It replaces no
    other: the library loses the places in the text of several characters replaced together."""

    def marked_or_not(text: str) -> str:
        same = [c + "".join(mark for (old, _), mark in marks.items() if old == c) for c in text]
        return "".join(f"[{each}]" for each in same)

    either = (
        f"(?<={marked_or_not(before[:-1])}{old})(?={marked_or_not(after)})"
        for before, after in words
    )
    return normalizers.Replace(Regex(f"{old}(?:{'|'.join(either)})"), mark)


def _words() -> list[str]:
    text = resources.files("palm_ds.text").joinpath("simplified_words.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _compiled(table: dict[int, int]) -> bytes:
    """The table in SentencePiece's form, which its trainer writes into every model."""
    import sentencepiece as spm
    from sentencepiece import sentencepiece_model_pb2 as schema

    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text("".join(f"{old:X}\t{new:X}\n" for old, new in table.items()), "utf-8")
        spm.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=iter(["a"]),
            model_writer=model,
            model_type="char",
            vocab_size=10,
            hard_vocab_limit=False,
            normalization_rule_tsv=str(rules),
            minloglevel=2,
        )
    proto = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap
