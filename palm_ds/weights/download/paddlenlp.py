"""PaddleNLP's names of models with ERNIE's shape, the Chinese ERNIE-Gram, ERNIE-M and UNIMO-text
among them: their files and their sizes.

    NAME.pdparams + NAME_vocab.txt   as published, ERNIE-M's with its SentencePiece model
    config.json                      from a preset and what differs, as PaddleNLP has it in its code

Sizes and addresses are those of its modules ernie.configuration and ernie.tokenizer, and of
ernie_gram's, ernie_m's and unimo's. Whatever a file has beside an encoder and the usual heads, such
as the two maps of uie, is reported as skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_ROOT = "https://bj.bcebos.com/paddlenlp/models/transformers/"
_OTHER_ROOT = "https://paddlenlp.bj.bcebos.com/models/transformers/"
"""Another address of the same files, of which PaddleNLP names some only here."""
_UNLIKE_WORDPIECE = (
    "its vocabulary has the size of RoBERTa's, but PaddleNLP reads it as WordPiece; the format of "
    "the file is undocumented"
)


@dataclass(frozen=True, kw_only=True)
class PaddleModel:
    """A model that is published as two files, or three."""

    preset: str
    """The encoder."""
    words: int
    """Rows of the token embeddings."""
    url: str = ""
    """The weights."""
    vocabulary: str
    """The address of vocab.txt."""
    pieces: str = ""
    """The address of the SentencePiece model whose pieces vocab.txt lists, if it does."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters that differ from the preset's."""
    model_type: str = "ernie"
    """PaddleNLP's class."""
    not_yet: str = ""
    """Why it cannot be opened; empty: it can."""

    @property
    def file(self) -> str:
        """The name in a mirror."""
        return mirrored(self.url)

    @property
    def urls(self) -> dict[str, str]:
        """{name that PaddleNLP saves a file with: its address}"""
        pieces = {"sentencepiece.bpe.model": self.pieces} if self.pieces else {}
        return {"model_state.pdparams": self.url, "vocab.txt": self.vocabulary, **pieces}

    def tokenizer_config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        from palm_ds.weights.formats.huggingface.families import FAMILIES

        named = FAMILIES[self.model_type].paddle_tokenizer
        return {"tokenizer_class": named, "do_lower_case": True}

    def config_json(self) -> dict[str, Any]:
        """The content of config.json, as PaddleNLP writes it."""
        from palm_ds.model.config.config import EncoderConfig
        from palm_ds.weights.formats.huggingface.architectures.bert import BertArchitecture
        from palm_ds.weights.formats.huggingface.families import FAMILIES

        values = {"preset": self.preset, "vocab_size": self.words, **self.changes}
        config = EncoderConfig.from_dict(values, self.url)
        return {
            "model_type": self.model_type,
            **BertArchitecture().config_json(config, "ernie"),
            # hard-coded in PaddleNLP, whatever a config says (palm_ds/weights/formats/paddle)
            "layer_norm_eps": FAMILIES[self.model_type].paddle_eps,
        }


def mirrored(url: str) -> str:
    """The path of a file in a mirror: names alone are not unique."""
    return url.rpartition("/models/transformers/")[2]


def _shape(preset: str, words: int, vocabulary: str, **changes: Any) -> PaddleModel:
    return PaddleModel(preset=preset, words=words, vocabulary=_ROOT + vocabulary, changes=changes)


_SIZES = ("base", "medium", "mini", "micro", "nano")
_OF_1 = _shape("ernie-1.0-base", 18_000, "ernie/vocab.txt")
_OF_2 = _shape("ernie-2.0-base", 30_522, "ernie_v2_base/vocab.txt", task_types=0)
_LARGE_OF_2 = _shape("ernie-2.0-large", 30_522, "ernie_v2_large/vocab.txt", task_types=0)
_OF_3 = {
    size: _shape(f"ernie-3.0-{size}-zh", 40_000, f"ernie_3.0/ernie_3.0_{size}_zh_vocab.txt")
    for size in ("xbase", *_SIZES)
}
_TINY = {
    size: _shape(
        f"ernie-3.0-tiny-{size}-v2-zh", 40_000, f"ernie_3.0/ernie_3.0_tiny_{size}_v2_vocab.txt"
    )
    for size in (*_SIZES, "pico")
}


def _models() -> Iterator[tuple[str, PaddleModel]]:
    """Each name and the model of its shape."""

    def of(shape: PaddleModel, path: str, root: str = _ROOT, **more: Any) -> PaddleModel:
        return replace(shape, url=f"{root}{path}.pdparams", **more)

    yield (
        "ernie-1.0-base-zh-cw",
        of(
            _shape("ernie-1.0-base-zh-cw", 40_000, "ernie/ernie_1.0_base_zh_cw_vocab.txt"),
            "ernie/ernie_1.0_base_zh_cw",
        ),
    )
    yield (
        "ernie-1.0-large-zh-cw",
        of(
            _shape("ernie-1.0-large-zh-cw", 18_000, "ernie/vocab.txt"),
            "ernie/ernie_1.0_large_zh_cw",
        ),
    )
    for size, words in (("base", 18_000), ("large", 12_800)):
        stem = f"ernie_2.0/ernie_2.0_{size}_zh"
        shape = _shape(f"ernie-2.0-{size}-zh", words, f"{stem}_vocab.txt", task_types=0)
        yield f"ernie-2.0-{size}-zh", of(shape, stem)
    yield (
        "ernie-2.0-base-en-finetuned-squad",
        of(_OF_2, "ernie_v2_base/ernie_v2_eng_base_finetuned_squad"),
    )
    yield "ernie-3.0-xbase-zh", of(_OF_3["xbase"], "ernie_3.0/ernie_3.0_xbase_zh")
    for size in _SIZES:
        yield f"ernie-3.0-tiny-{size}-v1-zh", of(_OF_3[size], f"ernie_3.0/ernie_3.0_{size}_zh")
    for size, shape in _TINY.items():
        yield f"ernie-3.0-tiny-{size}-v2-zh", of(shape, f"ernie_3.0/ernie_3.0_tiny_{size}_v2")
    stem = "ernie_3.0/ernie_3.0_tiny_mini_v2_en"
    english = {"max_positions": 514, "token_types": 1}
    shape = _shape("ernie-3.0-tiny-mini-v2-zh", 50_265, f"{stem}_vocab.txt", **english)
    yield "ernie-3.0-tiny-mini-v2-en", of(shape, stem, not_yet=_UNLIKE_WORDPIECE)
    yield from _of_rocketqa(of)
    yield from _of_uie(of)
    search = "ernie_search/ernie_search"
    for shape, kind in ((_OF_2, "base-dual-encoder"), (_LARGE_OF_2, "large-cross-encoder")):
        path = f"{search}_{kind.replace('-', '_')}_marco_en"
        yield f"ernie-search-{kind}-marco-en", of(shape, path, _OTHER_ROOT)
    yield from _of_utc(of)
    gram = _shape("ernie-gram-zh", 18_018, "ernie_gram_zh/vocab.txt")
    gram = replace(gram, model_type="ernie_gram")
    yield "ernie-gram-zh", of(gram, "ernie_gram_zh/ernie_gram_zh")
    tuned = "ernie-gram-zh-finetuned-dureader-robust"
    yield tuned, of(gram, f"{tuned}/model_state")
    yield from _of_many_languages(of)
    yield from _of_unimo(of)


def _of_rocketqa(of: Any) -> Iterator[tuple[str, PaddleModel]]:
    chinese = replace(_OF_1, vocabulary=f"{_ROOT}rocketqa/rocketqa-zh-dureader-vocab.txt")
    english = replace(_OF_2, vocabulary=f"{_ROOT}rocketqa/rocketqa-v1-marco-vocab.txt")
    for kind in ("query", "para", "cross"):
        for shape, name in (
            (chinese, "rocketqa-zh-dureader"),
            (english, "rocketqa-v1-marco"),
            (_OF_2, "rocketqav2-en-marco"),
        ):
            full = f"{name}-{kind}-encoder"
            yield full, of(shape, f"rocketqa/{full.replace('-', '_')}")
    for size in _SIZES:
        names = [f"rocketqa-zh-{size}-{kind}-encoder" for kind in ("query", "para")]
        for name in (*names, f"rocketqa-{size}-cross-encoder"):
            yield name, of(_OF_3[size], f"rocketqa/{name}", _OTHER_ROOT)


def _of_uie(of: Any) -> Iterator[tuple[str, PaddleModel]]:
    yield "uie-base-en", of(_OF_2, "uie/uie_base_en")
    for kind in ("answer-extractor", "qa-filter"):
        path = f"uie/uie_base_{kind.replace('-', '_')}"
        yield f"uie-base-{kind}", of(_OF_3["base"], path)
    for size in _SIZES:
        yield f"uie-{size}", of(_OF_3[size], f"uie/uie_{size}")
        root = _OTHER_ROOT if size == "base" else _ROOT
        yield f"uie-senta-{size}", of(_OF_3[size], f"uie/uie_senta_{size}", root)


def _of_many_languages(of: Any) -> Iterator[tuple[str, PaddleModel]]:
    """ERNIE-M, and the models fine-tuned from it."""
    for size in ("base", "large"):
        shape = replace(
            _shape(f"ernie-m-{size}", 250_002, "ernie_m/ernie_m.vocab.txt"),
            pieces=f"{_ROOT}ernie_m/ernie_m.sentencepiece.bpe.model",
            model_type="ernie_m",
        )
        yield f"ernie-m-{size}", of(shape, f"ernie_m/ernie_m_{size}", _OTHER_ROOT)
        yield f"uie-m-{size}", of(shape, f"uie_m/uie_m_{size}", _OTHER_ROOT)


def _of_unimo(of: Any) -> Iterator[tuple[str, PaddleModel]]:
    """UNIMO-text. Names have "-" in place of "_", as everywhere here."""
    base, large = (
        replace(_shape(preset, words, f"unimo/{preset}-vocab.txt"), model_type="unimo")
        for preset, words in (("unimo-text-1.0", 18_000), ("unimo-text-1.0-large", 12_800))
    )
    yield "unimo-text-1.0-large", of(large, "unimo/unimo-text-1.0-large")
    questions = "question-generation"
    full = {f"{questions}-v2": f"{questions}-full_domain"}
    for end in (
        "lcsts-new",
        "summary",
        "dureader_qg",
        questions,
        *full,
        f"{questions}-dureader_qg",
    ):
        stem = f"unimo/unimo-text-1.0-{full.get(end, end)}"
        yield f"unimo-text-1.0-{end}".replace("_", "-"), of(base, stem)
    yield "unimo-text-1.0", of(base, "unimo/unimo-text-1.0")


def _of_utc(of: Any) -> Iterator[tuple[str, PaddleModel]]:
    large = replace(
        _shape("ernie-1.0-large-zh-cw", 17_965, "", task_types=3),
        vocabulary=f"{_OTHER_ROOT}utc/utc_large_vocab.txt",
    )
    yield "utc-large", of(large, "utc/utc_large")
    for size, shape in {"xbase": _OF_3["xbase"], **_TINY}.items():
        vocabulary = f"{_OTHER_ROOT}utc/utc_{size}_vocab.txt"
        more = {"words": 39_981, "vocabulary": vocabulary}
        yield f"utc-{size}", of(shape, f"utc/utc-{size}", _OTHER_ROOT, **more)


PADDLENLP: dict[str, PaddleModel] = dict(_models())
"""By PaddleNLP's name."""
