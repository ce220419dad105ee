"""Displayed tokens of every kind of vocabulary."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from palm_ds.text.display import detokenize, display_tokens, token_texts
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, wordpiece
from palm_ds.text.train_tokenizer import train_tokenizer

TEXTS = ["the quick brown fox was unlearning everything", "他在北京学习。", "quickest learner"] * 30


def test_wordpiece_signs_are_kept() -> None:
    tokenizer = wordpiece([*SPECIALS, "un", "##learn", "##", "北", "."], lower=True)
    assert display_tokens(tokenizer, range(10)) == [*SPECIALS, "un", "##learn", "##", "北", "."]
    assert token_texts(tokenizer, [5, 6, 7]) == [("un", False), ("learn", True), ("##", False)]


def test_sentencepiece_signs_become_wordpiece_s() -> None:
    tokenizer = train_tokenizer(TEXTS, kind="sentencepiece", vocab_size=120)
    ids = tokenizer.encode_texts(["the unlearning 北京。"])[0][0]
    words = display_tokens(tokenizer, ids)
    assert words[-3:] == ["北", "京", "。"]
    whole = "".join(w.removeprefix("##") if w.startswith("##") else f" {w}" for w in words[:-3])
    assert whole.replace("▁", "").split() == ["the", "unlearning"]
    known = {token: i for i, token in enumerate(tokenizer.tokens(range(tokenizer.size)))}
    long = max((token for token in known if token.startswith("▁")), key=len)
    assert display_tokens(tokenizer, [known[long]]) == [long[1:]]
    assert display_tokens(tokenizer, [tokenizer.vocabulary.mask]) == [tokenizer.roles["mask"]]


def test_byte_level_characters_become_text() -> None:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("caf\u00e9 \u00e9t.")
    tokens = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    tokens += sorted({c for piece, _ in pieces for c in piece}) + [pieces[1][0]]
    known = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Backend(models.BPE(known, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert display_tokens(
        tokenizer, [known[pieces[1][0]], known["c"], known["."], known["<mask>"]]
    ) == [
        "\u00e9t",
        "##c",
        ".",
        "<mask>",
    ]


def test_written_text_of_wordpiece() -> None:
    words = ["un", "##learn", "##ed", "fox", ",", ".", "今", "天", "，", "。", "《", "》", "2020"]
    tokenizer = wordpiece([*SPECIALS, *words], lower=True)

    def again(text: str) -> str:
        return detokenize(tokenizer, tokenizer.encode_texts([text])[0][0])

    for text in ("unlearned fox, fox.", "今天，《今天》。", "2020今天fox。unlearned fox"):
        assert again(text) == text
    assert again("今 天 fox , fox") == "今天fox, fox"
    assert detokenize(tokenizer, [6, 7, 8]) == "learned fox"  # begins within a word
    state = Backend.from_str(tokenizer.backend.to_str())
    state.decoder = None  # type: ignore[assignment]
    assert detokenize(Tokenizer(state), [5, 6, 7, 8]) == "unlearned fox"


def test_written_text_of_sentencepiece() -> None:
    tokenizer = train_tokenizer(TEXTS, kind="sentencepiece", vocab_size=120)
    for text in ("the quick brown fox", "他在北京学习。"):
        assert detokenize(tokenizer, tokenizer.encode_texts([text])[0][0]) == text
