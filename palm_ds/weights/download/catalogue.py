"""The published models by name: PaddlePALM's list, the releases of ERNIE's repositories, and
PaddleNLP's names for them.

A model is an archive, two files of PaddleNLP's (paddlenlp.py), or a repository of the Hugging Face
Hub where its weights are as safetensors. One that no encoder here reads yet has `not_yet`: why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palm_ds.weights.download.paddlenlp import PADDLENLP, PaddleModel


@dataclass(frozen=True)
class Archive:
    """Location of a pretrained model, and the size and hash that its archive must have."""

    url: str
    size: int | None = None
    sha256: str | None = None
    preset: str = ""
    """The sizes of a UNIMO whose archive may lack a configuration."""
    not_yet: str = ""
    """Why it cannot be opened; empty: it can."""

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]

    def config_json(self) -> dict[str, Any]:
        """The configuration that ERNIE's repository keeps apart from the archive."""
        from palm_ds.model.config.config import EncoderConfig
        from palm_ds.weights.formats.huggingface.architecture import usual_config_json

        config = EncoderConfig.from_dict({"preset": self.preset, "vocab_size": _ROBERTAS_WORDS})
        return {"model_type": config.kind, **usual_config_json(config)}


@dataclass(frozen=True)
class HubModel:
    """The same weights in a repository of the hub."""

    repository: str
    not_yet: str = ""

    @property
    def file(self) -> str:
        return self.repository


_ROBERTAS_WORDS = 50_265
Published = Archive | PaddleModel | HubModel

_BERT = "https://bert-models.bj.bcebos.com/"
_ERNIE = "https://ernie.bj.bcebos.com/"
_XLNET = "https://xlnet.bj.bcebos.com/"
_NLP = "https://baidu-nlp.bj.bcebos.com/"
_GITHUB = "https://ernie-github.cdn.bcebos.com/model-"
_UNIMO = "https://unimo.bj.bcebos.com/model/"
_WENXIN = "https://bj.bcebos.com/wenxin-models/"

_XLNET_WHY = "XLNet's relative positions and two-stream attention are not implemented"
PRETRAIN: dict[str, Archive] = {
    # PaddlePALM's list. Sizes and checksums were never published.
    "RoBERTa-zh-base": Archive(_BERT + "chinese_roberta_wwm_ext_L-12_H-768_A-12.tar.gz"),
    "RoBERTa-zh-large": Archive(_BERT + "chinese_roberta_wwm_large_ext_L-24_H-1024_A-16.tar.gz"),
    "ERNIE-v2-en-base": Archive(_ERNIE + "ERNIE_Base_en_stable-2.0.0.tar.gz"),
    "ERNIE-v2-en-large": Archive(_ERNIE + "ERNIE_Large_en_stable-2.0.0.tar.gz"),
    "XLNet-cased-base": Archive(_XLNET + "xlnet_cased_L-12_H-768_A-12.tgz", not_yet=_XLNET_WHY),
    "XLNet-cased-large": Archive(_XLNET + "xlnet_cased_L-24_H-1024_A-16.tgz", not_yet=_XLNET_WHY),
    "ERNIE-v1-zh-base": Archive(_NLP + "ERNIE_stable-1.0.1.tar.gz"),
    "ERNIE-v1-zh-base-max-len-512": Archive(_ERNIE + "ERNIE_1.0_max-len-512.tar.gz"),
    "BERT-en-uncased-large-whole-word-masking": Archive(
        _BERT + "wwm_uncased_L-24_H-1024_A-16.tar.gz"
    ),
    "BERT-en-cased-large-whole-word-masking": Archive(_BERT + "wwm_cased_L-24_H-1024_A-16.tar.gz"),
    "BERT-en-uncased-base": Archive(_BERT + "uncased_L-12_H-768_A-12.tar.gz"),
    "BERT-en-uncased-large": Archive(_BERT + "uncased_L-24_H-1024_A-16.tar.gz"),
    "BERT-en-cased-base": Archive(_BERT + "cased_L-12_H-768_A-12.tar.gz"),
    "BERT-en-cased-large": Archive(_BERT + "cased_L-24_H-1024_A-16.tar.gz"),
    "BERT-multilingual-uncased-base": Archive(_BERT + "multilingual_L-12_H-768_A-12.tar.gz"),
    "BERT-multilingual-cased-base": Archive(_BERT + "multi_cased_L-12_H-768_A-12.tar.gz"),
    "BERT-zh-base": Archive(_BERT + "chinese_L-12_H-768_A-12.tar.gz"),
}
FORMER_NAMES = {
    # PaddlePALM before 1.0. bert-cn-large was listed too but never had an archive.
    "ernie-en-uncased-base": "ERNIE-v2-en-base",
    "ernie-en-uncased-large": "ERNIE-v2-en-large",
    # ERNIE's branches, papers and PaddleNLP name some models differently.
    "ernie-gram": "ernie-gram-zh",
    "ernie-gen-base": "ernie-gen-base-en",
    "ernie-gen-large": "ernie-gen-large-en",
    "ernie-gen-large-en-430g": "ernie-gen-large-430g-en",
    "ernie-unimo-base-en": "unimo-base-en",
    "ernie-unimo-large-en": "unimo-large-en",
}

_OWN_LAYOUT = "its archive has Wenxin's own layout, which is undocumented"
ERNIE: dict[str, Published] = {
    # The names that ERNIE's `develop` branch loads, and the archives of `repro`.
    "ernie-1.0": Archive(_GITHUB + "ernie1.0.1.tar.gz"),
    "ernie-tiny": Archive(_GITHUB + "ernie_tiny.1.tar.gz"),
    "ernie-2.0-en": Archive(_GITHUB + "ernie2.0-en.1.tar.gz"),
    "ernie-2.0-large-en": Archive(_GITHUB + "ernie2.0-large-en.1.tar.gz"),
    "ernie-gen-base-en": Archive(_GITHUB + "ernie-gen-base-en.1.tar.gz"),
    "ernie-gen-large-en": Archive(_GITHUB + "ernie-gen-large-en.1.tar.gz"),
    "ernie-gen-large-430g-en": Archive(_GITHUB + "ernie-gen-large-430g-en.1.tar.gz"),
    "ernie-gen-large-160g": Archive(_ERNIE + "ernie_gen_large_160g.tgz"),
    "ernie-gen-base-zh": Archive(_WENXIN + "ernie_gen_base_ch_open.tgz", not_yet=_OWN_LAYOUT),
    "ernie-gram-en": Archive(_GITHUB + "ernie-gram-en.1.tar.gz"),
    "ernie-doc-base-en": Archive(_GITHUB + "ernie-doc-base-en.tar.gz"),
    "ernie-doc-base-zh": Archive(_GITHUB + "ernie-doc-base-zh.tar.gz"),
    "ernie-doc-large-en": Archive(_GITHUB + "ernie-doc-large-en.tar.gz"),
    "ernie-vil-base-en": Archive(_GITHUB + "ernie-vil-base-en.1.tar.gz"),
    "ernie-vil-large-en": Archive(_GITHUB + "ernie-vil-large-en.1.tar.gz"),
    "ernie-vil-base-vcr-task-pre-en": Archive(_GITHUB + "ernie-vil-base-VCR-task-pre-en.1.tar.gz"),
    "ernie-vil-large-vcr-task-pre-en": Archive(
        _GITHUB + "ernie-vil-large-VCR-task-pre-en.1.tar.gz"
    ),
    **{
        f"unimo-{kind}{size}-en": Archive(
            f"{_UNIMO}unimo_{kind.replace('-', '_')}{size}_en.tar.gz", preset=f"unimo-{size}-en"
        )
        for kind in ("", "mnli-")
        for size in ("base", "large")
    },
    # PaddleNLP's names, where transformers' documentation names a repository with the weights.
    **{
        name: HubModel(f"nghuyong/{name}")
        for name in (
            *("ernie-1.0-base-zh", "ernie-2.0-base-en", "ernie-3.0-base-zh"),
            *("ernie-3.0-medium-zh", "ernie-3.0-mini-zh", "ernie-3.0-micro-zh"),
            *("ernie-3.0-nano-zh", "ernie-health-zh"),
        )
    },
    **PADDLENLP,
}
"""Every name is in lower case."""
MODELS: dict[str, Published] = {**PRETRAIN, **ERNIE}

DATA: dict[str, Archive] = {
    # The Chinese data sets of ERNIE's `repro` branch, in the folders that the recipes read.
    "task_data_zh": Archive(_ERNIE + "task_data_zh.tgz"),
}
"""Archives of data sets; they are unpacked into `data/`."""
