"""Weights of ERNIE-M and UNIMO of ERNIE's static graph and of PaddleNLP: the outputs that their own
programs gave, and the same tensors after a way through our formats."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import transformers

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.generation.cached_decoder import CachedDecoder, Prompt, TargetFormat
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import HIDDEN, Visibility, full, prefix_lm
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.download.catalogue import MODELS
from palm_ds.weights.download.downloader import Places, download
from palm_ds.weights.download.paddlenlp import PADDLENLP, PaddleModel, mirrored
from palm_ds.weights.formats.contents import CheckpointContents, read_tokenizer
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.open import open_checkpoint
from palm_ds.weights.formats.runnable import has_pooler, load_encoder, load_masked_lm
from tests.helpers.paddle_folder import write_paddle

ERNIE_M, NLP_M, UNIMO, NLP_UNIMO = "ernie_m", "paddlenlp_ernie_m", "unimo", "paddlenlp_unimo"
STRICT = ConversionOptions(strict=True, verify=False)
Arrays = dict[str, np.ndarray]


def arrays_of(name: str, shared: Path) -> Arrays:
    """Inputs and outputs, without the last axis that static graphs give ids."""
    arrays = dict(np.load(shared / "oracle" / name / "io.npz"))
    return {x: y.squeeze(-1) if y.shape[-1] == 1 else y for x, y in arrays.items()}


def packed(arrays: Arrays, real: np.ndarray, seen: list[Visibility] | None = None) -> Batch:
    """All texts in one row."""
    segments = arrays.get("in_sent_ids", np.zeros_like(arrays["in_src_ids"]))
    texts = [
        PackedText(
            input_ids=arrays["in_src_ids"][i][mask],
            token_type_ids=segments[i][mask],
            visibility=None if seen is None else seen[i],
        )
        for i, mask in enumerate(real)
    ]
    return Batch.from_rows([texts], length=int(real.sum()) + 3, pad=1)


def computed(
    contents: CheckpointContents,
    arrays: Arrays,
    real: np.ndarray,
    seen: list[Visibility] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(vectors of all real tokens, what the pooler makes of each text's first, if there is one)."""
    encoder = load_encoder(contents)
    with torch.no_grad():
        vectors = encoder(packed(arrays, real, seen))[0, : real.sum()]
        first = vectors[np.concatenate([[0], np.cumsum(real.sum(1))[:-1]])]
        return vectors, encoder.pooler(first) if has_pooler(contents) else first


def same(found: torch.Tensor, expected: np.ndarray) -> bool:
    return np.abs(found.detach().numpy() - expected).max() < 2e-5


def test_ernie_m_computes_as_ernies_program(shared: Path) -> None:
    contents, arrays = open_checkpoint(shared / "oracle" / ERNIE_M), arrays_of(ERNIE_M, shared)
    config = contents.config
    assert (config.kind, config.position_offset, config.pad) == ("bert", 2, 1)
    real = arrays["in_input_mask"] > 0
    vectors, pooled = computed(contents, arrays, real)
    assert same(vectors, arrays["out_sequence_output"][real])
    assert same(pooled, arrays["out_pooled_output"])


def test_ernie_m_computes_as_paddlenlp(shared: Path, tmp_path: Path) -> None:
    """It was given no mask there, and masks the id 0 then, which is [CLS], and no padding. In
    transformers the first token can be hidden from itself too."""
    source, arrays = shared / "oracle" / NLP_M, arrays_of(NLP_M, shared)
    ids = torch.from_numpy(arrays["in_src_ids"])
    contents, tokens = open_checkpoint(source), ids.shape[1]
    order = np.zeros(tokens, np.int32)
    order[0] = HIDDEN
    seen = [Visibility(order, np.zeros(tokens, np.int32))] * len(ids)
    vectors, _ = computed(contents, arrays, np.ones(ids.shape, bool), seen)
    expected = arrays["out_sequence_output"]
    assert same(vectors.view(*ids.shape, -1)[:, 1:], expected[:, 1:])

    options = ConversionOptions(strict=True, family="xlm-roberta", verify=False)
    convert(source, tmp_path / "hf", "huggingface", options)
    its = transformers.XLMRobertaForSequenceClassification.from_pretrained(tmp_path / "hf")
    mask = torch.where(ids == 0, -1e4, 0.0)[:, None, None].expand(-1, 1, tokens, -1)
    places = torch.arange(2, tokens + 2).expand_as(ids)
    with torch.no_grad():
        made = its(ids, mask, position_ids=places, output_hidden_states=True)
    assert same(made.hidden_states[-1], expected)
    assert same(made.logits, arrays["out_logits"])


def test_unimo_computes_as_ernies_program_on_texts(shared: Path) -> None:
    """Read in both directions, and from left to right after a prefix."""
    contents, arrays = open_checkpoint(shared / "oracle" / UNIMO), arrays_of(UNIMO, shared)
    assert (contents.config.kind, contents.config.token_types) == ("unimo", 1)
    real = arrays["in_mask_l"][:, 0] > 0
    vectors, pooled = computed(contents, arrays, real)
    assert same(vectors, arrays["out_l_sequence_output"][real])
    assert same(pooled, arrays["out_l_pooled_text"])
    seen = [prefix_lm(5, int(count) - 5) for count in real.sum(1)]
    vectors, _ = computed(contents, arrays, real, seen)
    assert same(vectors, arrays["out_l_prefix_sequence_output"][real])


def test_unimo_text_computes_as_paddlenlp(shared: Path) -> None:
    contents, arrays = open_checkpoint(shared / "oracle" / NLP_UNIMO), arrays_of(NLP_UNIMO, shared)
    config = contents.config
    assert (config.kind, config.token_types, config.position_offset) == ("unimo", 4, 0)
    real = np.ones_like(arrays["in_src_ids"], bool)
    vectors, _ = computed(contents, arrays, real, [prefix_lm(7, 5)] * 2)
    assert same(vectors, arrays["out_sequence_output"][real])
    head = load_masked_lm(contents, "masked_words", load_encoder(contents))
    assert same(head.logits(vectors), arrays["out_lm_logits"][real])
    assert not same(computed(contents, arrays, real, [full(12)] * 2)[0], vectors.numpy())


@torch.inference_mode()
def test_unimo_text_predicts_next_tokens_as_paddlenlp(shared: Path) -> None:
    """Step by step over caches: the scores after each token of the targets."""
    contents, arrays = open_checkpoint(shared / "oracle" / NLP_UNIMO), arrays_of(NLP_UNIMO, shared)
    encoder = load_encoder(contents)
    head = load_masked_lm(contents, "masked_words", encoder)
    ids, types = arrays["in_src_ids"], arrays["in_sent_ids"]
    (kind,) = set(types[:, 7:].flatten().tolist())
    frame = TargetFormat(begin=0, query=None, end=0, token_type=kind)
    prompts = [
        Prompt(source=PackedText(input_ids=text[:7], token_type_ids=segments[:7]), position=7)
        for text, segments in zip(ids, types, strict=True)
    ]
    decoder = CachedDecoder(encoder, head.logits, prompts, frame)
    for place in range(7, 12):
        scores = decoder.step(torch.from_numpy(ids[:, place]))
        assert same(scores, arrays["out_lm_logits"][:, place])


# ---- there and back ----


def tensors(contents: CheckpointContents) -> dict[str, torch.Tensor]:
    return {name: entry.read() for name, entry in contents.entries.items()}


def equal(one: CheckpointContents, other: CheckpointContents) -> bool:
    before, after = tensors(one), tensors(other)
    same_values = all(torch.equal(value, after[name]) for name, value in before.items())
    return before.keys() == after.keys() and same_values and one.config == other.config


@pytest.mark.parametrize("name", [ERNIE_M, NLP_M, NLP_UNIMO])
def test_there_and_back_without_loss(name: str, shared: Path, tmp_path: Path) -> None:
    source = open_checkpoint(shared / "oracle" / name)
    convert(source.path, tmp_path / "ours", "palm_ds", STRICT)
    ours = open_checkpoint(tmp_path / "ours")
    assert equal(source, ours)
    family = "unimo" if name == NLP_UNIMO else "ernie_m"
    convert(tmp_path / "ours", tmp_path / "theirs", "paddle", replace(STRICT, family=family))
    assert equal(source, open_checkpoint(tmp_path / "theirs"))
    if name != ERNIE_M:
        written = pickle.loads((tmp_path / "theirs/model_state.pdparams").read_bytes())
        original = dict(np.load(source.path / "weights.npz"))
        assert original.keys() == written.keys() - {"StructuredToParameterName@@"}
        assert all(np.array_equal(values, written[x]) for x, values in original.items())
        config = json.loads((tmp_path / "theirs/config.json").read_text())
        theirs = json.loads((source.path / "config.json").read_text())
        assert config["architectures"] == theirs["architectures"]


def test_ernie_m_is_an_xlm_roberta_in_transformers(shared: Path, tmp_path: Path) -> None:
    """`convert` compares with transformers' outputs; back from there it is the same ERNIE-M."""
    source = shared / "oracle" / NLP_M
    options = ConversionOptions(strict=True, family="xlm-roberta")
    result = convert(source, tmp_path / "hf", "huggingface", options)
    assert result.parity is not None and result.parity.worst.largest < 2e-5
    assert list(result.report.created.values())[0] == "zeros: ERNIE-M has no token types"
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "xlm-roberta"
    convert(tmp_path / "hf", tmp_path / "back", "paddle", replace(STRICT, family="ernie_m"))
    assert equal(open_checkpoint(source), open_checkpoint(tmp_path / "back"))
    with pytest.raises(UserError, match="transformers has no ernie_m, or no longer; --to paddle"):
        convert(source, tmp_path / "no", "huggingface", replace(STRICT, family="ernie_m"))


def test_paddlenlps_form_has_no_parts_for_images(shared: Path, tmp_path: Path) -> None:
    """What is left is moved to PaddleNLP's positions, and has token types of zeros there."""
    source = shared / "oracle" / UNIMO
    options = replace(STRICT, family="unimo")
    with pytest.raises(UserError, match="image_emb.b_0 would be skipped: no place in UNIMOModel"):
        convert(source, tmp_path / "no", "paddle", options)
    result = convert(source, tmp_path / "theirs", "paddle", replace(options, strict=False))
    assert "zeros" in str(result.report.created) and "pooled_fc_text.w_0" in result.report.skipped
    contents, arrays = open_checkpoint(tmp_path / "theirs"), arrays_of(UNIMO, shared)
    assert (contents.config.position_offset, contents.config.token_types) == (0, 2)
    real = arrays["in_mask_l"][:, 0] > 0
    arrays["in_sent_ids"] = np.zeros_like(arrays["in_src_ids"])
    assert same(computed(contents, arrays, real)[0], arrays["out_l_sequence_output"][real])


def test_a_config_as_released(shared: Path, tmp_path: Path) -> None:
    """ERNIE's config of UNIMO says that there are 0 token types, and has another name."""
    source = shared / "oracle" / UNIMO
    shutil.copytree(source / "params", tmp_path / "params")
    config = json.loads((source / "unimo_config.json").read_text())
    config |= {"type_vocab_size": 0, "sent_type_vocab_size": 0, "task_type_vocab_size": 0}
    (tmp_path / "unimo_base_en.json").write_text(json.dumps(config))
    contents = open_checkpoint(tmp_path)
    assert contents.config == open_checkpoint(source).config
    assert not any("token types" in note for note in contents.notes)


# ---- downloads, on small models made here ----


def small(name: str, vocabulary: Path, tmp_path: Path) -> PaddleModel:
    """The model with one layer and this vocabulary; its files are in a mirror."""
    words = len(vocabulary.read_text("utf-8").splitlines())
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2}
    model = replace(PADDLENLP[name], words=words, changes=sizes)
    config = EncoderConfig.from_dict({"preset": model.preset, "vocab_size": words, **sizes})
    torch.manual_seed(3)
    state = {f"backbone.{x}": y for x, y in build_encoder(config).state_dict().items()}
    if "backbone.segment.weight" in state and config.token_types == 1:
        state["backbone.segment.weight"].zero_()
    target = ExportOptions(family=model.model_type)
    write_paddle(state, tmp_path / "made", config, target=target)
    files = {model.url: tmp_path / "made/model_state.pdparams", model.vocabulary: vocabulary}
    if model.pieces:
        files[model.pieces] = vocabulary.with_name("sentencepiece.bpe.model")
    for address, file in files.items():
        place = tmp_path / "mirror" / mirrored(address)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return model


def vocabulary_of(tmp_path: Path) -> Path:
    """ERNIE-M's two files, of a model trained here."""
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "北京 是 城市"] * 9),
        model_writer=pieces,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=pieces.getvalue())
    names = [trained.id_to_piece(i) for i in range(3, trained.get_piece_size())]
    tokens = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *reversed(names), "[MASK]"]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces.getvalue())
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", "utf-8")
    return tmp_path / "vocab.txt"


@pytest.mark.parametrize("name", ["ernie-m-base", "unimo-text-1.0-dureader_qg"])
def test_a_downloaded_folder_opens_and_is_written_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights, its configuration and its tokenizer; nothing is skipped."""
    known, m = name.replace("_", "-"), name.startswith("ernie-m")
    if m:
        vocabulary = vocabulary_of(tmp_path)
    else:
        vocabulary = tmp_path / "vocab.txt"
        words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "北", "京", "dog"]
        vocabulary.write_text("".join(f"{word}\t{i}\n" for i, word in enumerate(words)), "utf-8")
    model = small(known, vocabulary, tmp_path)
    monkeypatch.setitem(MODELS, known, model)
    places = Places(mirror=str(tmp_path / "mirror"), cache=tmp_path / "cache")
    folder = download(name, path=tmp_path, places=places)

    contents, made = open_checkpoint(folder), open_checkpoint(tmp_path / "made")
    assert equal(contents, made) and not contents.skipped
    assert contents.config.layer_norm_eps == 1e-5
    tokenizer = read_tokenizer(contents)
    assert tokenizer is not None and tokenizer.vocabulary.separators == (2 if m else 1)
    if not m:
        assert tokenizer.encode_words(["北京 Dog"]) == [[5, 6, 7]]
    convert(folder, tmp_path / "ours", "palm_ds", STRICT)
    family = replace(STRICT, family=model.model_type)
    convert(tmp_path / "ours", tmp_path / "back", "paddle", family)
    assert equal(contents, open_checkpoint(tmp_path / "back"))
    again = load_tokenizer(tmp_path / "back")
    assert again.fingerprint == tokenizer.fingerprint
    settings = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == ("ErnieMTokenizer" if m else "UNIMOTokenizer")
    if m:
        (tmp_path / "back/tokenizer.json").unlink()
        assert load_tokenizer(tmp_path / "back").fingerprint == tokenizer.fingerprint
