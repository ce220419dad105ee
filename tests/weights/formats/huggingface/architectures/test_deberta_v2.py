"""DeBERTa beyond what all families have: lengths in both kinds of buckets, Microsoft's names, the
convolution in packed rows, and what shapes do not show."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DebertaV2ForMaskedLM

from palm_ds.common.errors import UserError
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder, load_masked_lm
from tests.helpers.hf_families import DEBERTA, NARROW
from tests.model.encoder.test_transformer import texts, weighted

NASTY = [
    "  two  spaces ",
    "naïve café",
    "日本語 text",
    "🙂🙃",
    "tab\tnew\nline",
    "Don't @x.y 3.14",
]
COMPATIBLE = "ﬁ ① ＡＢ"
"""What SentencePiece's own normalization makes other characters of."""
REAL = {**NARROW, "position_buckets": 256, "max_relative_positions": -1}


def changed(folder: Path, **values: Any) -> Path:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))
    return folder


@pytest.mark.parametrize(
    ("built", "stated", "unread"),
    [
        ({}, {"norm_rel_ebd": "none"}, "encoder.LayerNorm.weight"),
        (
            {"share_att_key": False},
            {"share_att_key": True},
            "encoder.layer.0.attention.self.pos_key_proj.weight",
        ),
        (
            {"type_vocab_size": 2},
            {"type_vocab_size": 0},
            "embeddings.token_type_embeddings.weight",
        ),
        (
            {"conv_kernel_size": 3, "conv_act": "gelu"},
            {"conv_kernel_size": 0},
            "encoder.conv.conv.weight",
        ),
    ],
)
def test_what_the_configuration_does_not_have_is_skipped_as_in_transformers(
    tmp_path: Path, built: dict[str, Any], stated: dict[str, Any], unread: str
) -> None:
    contents = open_contents(changed(DEBERTA.save(tmp_path, **built), **stated))
    assert "no such part" in contents.skipped[unread]
    inputs = inputs_for(contents, contents, None)
    assert compare(in_transformers(contents), in_palm_ds(contents), inputs).passed


@pytest.mark.parametrize("length", [100, 300, 512])
def test_single_and_logarithmic_buckets_are_those_of_transformers(
    tmp_path: Path, length: int
) -> None:
    """Beside a shorter text with padding."""
    model = DEBERTA.build(**REAL, max_position_embeddings=512)
    model.save_pretrained(tmp_path)
    encoder = load_encoder(open_contents(tmp_path))
    rows = [[text] for text in texts((length, length // 3))]
    batch = Batch.from_rows(rows, length=length, pad=0)
    real = batch.sequence_ids >= 0
    expected = model(input_ids=batch.input_ids, attention_mask=real.long()).last_hidden_state[real]
    found = encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    mine, its = encoder.get_parameter("distance.weight").grad, model.encoder.rel_embeddings
    scale = float(its.weight.grad.abs().max())
    torch.testing.assert_close(mine, its.weight.grad, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(
    "terms", [["c2p", "p2c"], ["c2p"], ["p2c"]], ids=lambda terms: "+".join(terms)
)
def test_maps_of_distances_positions_and_token_types_are_those_of_transformers(
    tmp_path: Path, terms: list[str]
) -> None:
    """Outputs, gradients and a packed row; written as they were read."""
    own = {"share_att_key": False, "position_biased_input": True, "type_vocab_size": 2}
    model = DEBERTA.build(**own, pos_att_type=terms, position_buckets=-1)
    model.save_pretrained(tmp_path / "in")
    contents = open_contents(tmp_path / "in")
    encoder = load_encoder(contents)
    several = texts((30, 44))
    batch = Batch.from_rows([[text] for text in several], length=44, pad=0)
    batch.token_type_ids.copy_(batch.input_ids % 2)
    real = batch.sequence_ids >= 0
    expected = model(
        input_ids=batch.input_ids,
        attention_mask=real.long(),
        token_type_ids=batch.token_type_ids,
    ).last_hidden_state[real]
    found = encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    mine, its = encoder.layers[0], model.encoder.layer[0].attention.self
    pairs = [
        (encoder.get_parameter("position.weight"), model.embeddings.position_embeddings.weight),
        (encoder.get_parameter("segment.weight"), model.embeddings.token_type_embeddings.weight),
        *((mine.distance_key.weight, its.pos_key_proj.weight) for _ in terms if "c2p" in terms),
        *((mine.distance_query.weight, its.pos_query_proj.weight) for _ in terms if "p2c" in terms),
    ]
    for one, other in pairs:
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5 * scale, rtol=0)
    packed = Batch.from_rows([several], length=74, pad=0)
    packed.token_type_ids.copy_(packed.input_ids % 2)
    torch.testing.assert_close(encoder(packed)[0, 30:], encoder(batch)[1], atol=1e-5, rtol=1e-5)
    convert(tmp_path / "in", tmp_path / "out", "huggingface", ConversionOptions(strict=True))
    read, written = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    assert read.keys() == written.keys() and all(torch.equal(read[x], written[x]) for x in read)


def test_the_table_of_distances_is_dropped_out_alike_in_all_micro_batches(tmp_path: Path) -> None:
    """A mask for each layer and step, whatever rows a process has."""
    folder = DEBERTA.save(tmp_path, share_att_key=False, hidden_dropout_prob=0.25)
    encoder = load_encoder(open_contents(folder), Kernels(dropout="counter")).train()
    seen: list[torch.Tensor] = []
    for layer in encoder.layers:
        layer.distance_key.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    for key, first, size in ((7, 0, 9), (7, 5, 30), (8, 0, 9)):
        batch = Batch.from_rows([texts((size,))], length=size, pad=0)
        batch.dropout_key, batch.first_row = key, first
        encoder(batch)
    whole = encoder.distance_norm(encoder.distance.weight)[None]
    for table in seen:
        kept = table != 0
        assert 0.7 < kept.float().mean() < 0.8
        torch.testing.assert_close(table[kept], whole[kept] / 0.75)
    step, same, other = seen[:3], seen[3:6], seen[6:]
    assert all(torch.equal(*pair) for pair in zip(step, same, strict=True))
    assert not torch.equal(step[0], step[1]) and not torch.equal(step[0], other[0])


def test_microsofts_head_is_read_and_written_as_transformers_computes_it(tmp_path: Path) -> None:
    """A published folder names no class, has the discriminator's head and a table of positions that
    nothing reads, and its config.json does not say `legacy: false`."""
    folder = DEBERTA.save(tmp_path / "in", "ForMaskedLM")
    changed(folder, architectures=None, legacy=True, pos_att_type="p2c|c2p")
    state = load_file(folder / "model.safetensors")
    detecting = {"dense": (48, 48), "LayerNorm": (48,), "classifier": (1, 48)}
    for part, shape in detecting.items():
        state[f"mask_predictions.{part}.weight"] = torch.randn(shape)
        state[f"mask_predictions.{part}.bias"] = torch.randn(shape[0])
    state["deberta.embeddings.position_embeddings.weight"] = torch.zeros(520, 48)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    contents = open_contents(folder)
    assert set(contents.heads) == {"masked_words", "replaced_tokens"}
    assert contents.skipped.keys() == {"deberta.embeddings.position_embeddings.weight"}
    convert(folder, tmp_path / "out", "huggingface")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys() - contents.skipped.keys()
    assert all(torch.equal(written[name], state[name]) for name in written)
    model: Any = DebertaV2ForMaskedLM.from_pretrained(tmp_path / "out")
    encoder, batch = load_encoder(contents), Batch.from_rows([texts((30,))], length=30, pad=0)
    head = load_masked_lm(contents, "masked_words", encoder)
    found = head.logits(encoder(batch))
    torch.testing.assert_close(model.eval()(batch.input_ids).logits, found, atol=1e-5, rtol=1e-5)


def test_the_head_of_transformers_older_class_is_the_same(tmp_path: Path) -> None:
    folder = DEBERTA.save(tmp_path / "in", "ForMaskedLM", legacy=True)
    contents = open_contents(folder)
    assert set(contents.heads) == {"masked_words"}
    inputs = inputs_for(contents, contents, None)
    assert compare(in_transformers(contents), in_palm_ds(contents), inputs).passed
    convert(folder, tmp_path / "out", "huggingface")
    written = open_contents(tmp_path / "out")
    assert any(x.startswith("lm_predictions.lm_head.") for x in load_names(tmp_path / "out"))
    assert compare(in_transformers(contents), in_transformers(written), inputs).passed


def load_names(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


def test_a_convolution_sees_no_other_text(tmp_path: Path) -> None:
    folder = DEBERTA.save(tmp_path, conv_kernel_size=5, conv_act="gelu", num_hidden_layers=1)
    contents, several = open_contents(folder), texts((9, 1, 30))
    assert contents.config.options["convolution"] == 5
    encoder, start = load_encoder(contents), 0
    batch = Batch.from_rows([several], length=44, pad=0)
    packed, at = encoder(batch)[0], torch.tensor([0, 9, 20])
    torch.testing.assert_close(encoder(batch, at), packed[at])
    for text in several:
        size = len(text.input_ids)
        alone = encoder(Batch.from_rows([[text]], length=size, pad=0))[0]
        torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
        start += size


@pytest.mark.parametrize("what", ["terms", "directions", "query and key", "norm"])
def test_what_shapes_do_not_show_is_noticed(tmp_path: Path, what: str) -> None:
    right, wrong = DEBERTA.save(tmp_path / "a"), DEBERTA.save(tmp_path / "b")
    state = load_file(wrong / "model.safetensors")
    if what == "terms":
        changed(wrong, pos_att_type=["c2p"])
    if what == "norm":
        state["encoder.LayerNorm.weight"] += 0.1
    if what == "directions":
        name = "encoder.rel_embeddings.weight"
        state[name] = state[name].flip(0).contiguous()
    if what == "query and key":
        names = [f"encoder.layer.1.attention.self.{x}_proj.weight" for x in ("query", "key")]
        state |= {names[0]: state[names[1]].clone(), names[1]: state[names[0]].clone()}
    save_file(state, wrong / "model.safetensors", {"format": "pt"})
    a, b = open_contents(right), open_contents(wrong)
    assert not compare(in_transformers(a), in_palm_ds(b), inputs_for(a, b, None)).passed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"relative_attention": False}, "relative_attention: must be true here, got false"),
        ({"share_att_key": "no"}, "share_att_key: expected true or false"),
        ({"type_vocab_size": -1}, "type_vocab_size: expected a whole number from 0"),
        ({"position_biased_input": True}, "it has no .*position"),
        ({"pos_att_type": ["p2p"]}, "pos_att_type: must be c2p, p2c or both"),
        ({"pos_att_type": None}, "pos_att_type: must be c2p, p2c or both"),
        ({"norm_rel_ebd": "group"}, "norm_rel_ebd: must be layer_norm or none"),
        ({"position_buckets": "256"}, "position_buckets: expected a whole number"),
        ({"embedding_size": 20}, "embedding_size: must be 48 here, got 20"),
        ({"hidden_size": None}, "hidden_size: expected a whole number from 1 to 65,536, got null"),
        ({"num_attention_heads": "4"}, "num_attention_heads: expected a whole number"),
        ({"conv_kernel_size": 3}, 'config.json: .*convolution_activation: no "tanh"'),
    ],
)
def test_another_model_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = changed(DEBERTA.save(tmp_path), **values)
    with pytest.raises(UserError, match=message):
        load_encoder(open_contents(folder))


def test_a_config_without_terms_is_refused(tmp_path: Path) -> None:
    folder = DEBERTA.save(tmp_path)
    about = json.loads((folder / "config.json").read_text())
    del about["pos_att_type"]
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="pos_att_type: must be c2p, p2c or both, got null"):
        open_contents(folder)


def spm_model() -> bytes:
    """A model with the first tokens of Microsoft's."""
    import sentencepiece

    made: Any = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter(["fi 1 AB river night 3.14", "naive café 日本語", *NASTY] * 9),
        model_writer=made,
        vocab_size=200,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
        **{f"{x}_id": i for i, x in enumerate(("pad", "bos", "eos", "unk"))},
        **{f"{x}_piece": f"[{y}]" for x, y in zip(("pad", "bos", "eos", "unk"), ENDS, strict=True)},
    )
    return made.getvalue()


ENDS = ("PAD", "CLS", "SEP", "UNK")


def test_its_tokenizer_has_the_ids_of_transformers_and_of_sentencepiece(tmp_path: Path) -> None:
    """Alone, `spm.model` is read with its own normalization, which transformers 5 leaves out; a
    tokenizer.json is read as it is."""
    import sentencepiece

    folder, model = DEBERTA.save(tmp_path / "in"), spm_model()
    (folder / "spm.model").write_bytes(model)
    about = {"do_lower_case": False, "vocab_type": "spm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    its = AutoTokenizer.from_pretrained(folder)
    its.save_pretrained(tmp_path / "json")
    assert (tmp_path / "json" / "tokenizer.json").is_file()
    for place, sentences in ((folder, NASTY), (tmp_path / "json", [*NASTY, COMPATIBLE])):
        mine = load_tokenizer(place)
        known = mine.vocabulary
        assert (known.pad, known.cls, known.sep, known.unk) == (0, 1, 2, 3)
        assert known.mask == its.mask_token_id == len(its) - 1
        for text, (ids, _) in zip(sentences, mine.encode_texts(sentences), strict=True):
            assert list(ids) == its(text, add_special_tokens=False)["input_ids"], text
    own: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
    ((ids, _),) = load_tokenizer(folder).encode_texts([COMPATIBLE])
    assert list(ids) == own.encode(COMPATIBLE) and 3 not in ids
