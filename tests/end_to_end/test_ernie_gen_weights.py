"""Weights of ERNIE-GEN in both of ERNIE's eras: scores of the next token equal those of the
released equations, written out here over Paddle's own names and orientation."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import BertForMaskedLM

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.generation.cached_decoder import CachedDecoder, Prompt, TargetFormat
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.weights.convert.convert import convert
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.open import open_checkpoint
from tests.weights.formats.paddle_made import write_folder

Arrays = dict[str, np.ndarray]
WIDTH, HEADS, LAYERS, WORDS, PLACES = 16, 2, 2, 13, 24
TARGET_TYPE = 3  # tgt_type_id of the released configs
CONFIG = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": WORDS,
    "max_position_embeddings": PLACES,
    "type_vocab_size": 4,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
PARTS = {  # repro's name -> develop's
    "multi_head_att_query_fc": "attn.q",
    "multi_head_att_key_fc": "attn.k",
    "multi_head_att_value_fc": "attn.v",
    "multi_head_att_output_fc": "attn.o",
    "post_att_layer_norm": "ln1",
    "ffn_fc_0": "ffn.i",
    "ffn_fc_1": "ffn.o",
    "post_ffn_layer_norm": "ln2",
}
OTHERS = {
    "word_embedding": "word_emb.weight",
    "pos_embedding": "pos_emb.weight",
    "sent_embedding": "sent_emb.weight",
    "pre_encoder_layer_norm_scale": "ln.weight",
    "pre_encoder_layer_norm_bias": "ln.bias",
    "mask_lm_trans_fc.w_0": "mlm.weight",
    "mask_lm_trans_fc.b_0": "mlm.bias",
    "mask_lm_trans_layer_norm_scale": "mlm_ln.weight",
    "mask_lm_trans_layer_norm_bias": "mlm_ln.bias",
    "mask_lm_out_fc.b_0": "mlm_bias",
}
FRAME = TargetFormat(begin=1, query=3, end=2, token_type=TARGET_TYPE)
SOURCE, TARGET = [1, 5, 6, 7, 2, 8, 9, 2], [1, 10, 11, 12, 2]
SEGMENTS = [0, 0, 0, 0, 0, 1, 1, 1]
Types = Mapping[str, list[int]]
SENTENCES: Types = {"sent": [*SEGMENTS, *[TARGET_TYPE] * len(TARGET)]}
# facts 5 6, turns 7, 8 and 9, as ERNIE's reader numbers them (without a [SEP] after 7)
DIALOGUE: Types = {
    "role": [1, 2, 2, 2, 1, 0, 0, 1, *[0] * len(TARGET)],
    "turn": [3, 0, 0, 0, 3, 2, 2, 1, *[0] * len(TARGET)],
}


def released(*, dialogue: bool = False) -> Arrays:
    """The variables of an ERNIE-GEN of the static graph: no pooler, no task embedding."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(scale=0.3, size=shape).astype(np.float32)  # noqa: E731
    shapes: dict[str, tuple[int, ...]] = {
        "word_embedding": (WORDS, WIDTH),
        "pos_embedding": (PLACES, WIDTH),
        "sent_embedding": (4, WIDTH),
        "mask_lm_trans_fc.w_0": (WIDTH, WIDTH),
        "mask_lm_out_fc.b_0": (WORDS,),
    }
    for layer in range(LAYERS):
        for part in PARTS:
            name, inner = f"encoder_layer_{layer}_{part}", 4 * WIDTH
            if part.endswith("norm"):
                shapes |= {f"{name}_scale": (WIDTH,), f"{name}_bias": (WIDTH,)}
                continue
            rows = inner if part == "ffn_fc_1" else WIDTH
            columns = inner if part == "ffn_fc_0" else WIDTH
            shapes |= {f"{name}.w_0": (rows, columns), f"{name}.b_0": (columns,)}
    arrays = {name: draw(*shape) for name, shape in shapes.items()}
    arrays |= {name: draw(WIDTH) for name in OTHERS if name not in arrays}
    if dialogue:
        del arrays["sent_embedding"]
        arrays |= {"role_embedding": draw(3, WIDTH), "turn_embedding": draw(5, WIDTH)}
    return arrays


def develop(arrays: Arrays) -> Arrays:
    """The same under the names of ERNIE's dygraph."""
    ends = {".w_0": "weight", ".b_0": "bias", "_scale": "weight", "_bias": "bias"}
    renamed = {OTHERS[name]: array for name, array in arrays.items() if name in OTHERS}
    for layer in range(LAYERS):
        for part, theirs in PARTS.items():
            for end, ending in ends.items():
                if (name := f"encoder_layer_{layer}_{part}{end}") in arrays:
                    renamed[f"encoder_stack.block.{layer}.{theirs}.{ending}"] = arrays[name]
    assert len(renamed) == len(arrays)
    return renamed


def static_folder(
    folder: Path, config: Mapping[str, Any] = CONFIG, *, dialogue: bool = False
) -> Path:
    write_folder(folder / "params", released(dialogue=dialogue))
    (folder / "ernie_config.json").write_text(json.dumps(config))
    return folder


def dygraph_folder(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    values = pickle.dumps(develop(released()), 4)
    (folder / "saved_weights.pdparams").write_bytes(values)
    (folder / "ernie_config.json").write_text(json.dumps({**config, "has_pooler": False}))
    return folder


# ---- the released equations (ernie-gen/model, ernie-gen/reader/batching.py) ----


def norm(
    arrays: Mapping[str, torch.Tensor], name: str, x: torch.Tensor, eps: float
) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), arrays[f"{name}_scale"], arrays[f"{name}_bias"], eps)


def dense(arrays: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ arrays[f"{name}.w_0"] + arrays[f"{name}.b_0"]


def flows(eps: float = 1e-5, types: Types = SENTENCES) -> torch.Tensor:
    """(target tokens - 1, vocabulary): the scores at the queries of SOURCE and TARGET. A stream of
    source and target, under a unidirectional mask, and a stream of queries, whose keys are those of
    both streams; masks are added to the scores."""
    variables = released(dialogue=types is DIALOGUE)
    arrays = {name: torch.from_numpy(array) for name, array in variables.items()}
    many, total = len(TARGET), len(SOURCE) + len(TARGET)
    start = len(SOURCE)
    seen = torch.zeros(total, total)  # gen_unidirectional_mask
    seen[:, :start] = 1
    seen[start:, start:] = torch.ones(many, many).tril()
    queried = torch.zeros(many, total + many)  # gen_query_input
    for i in range(many):
        queried[i, : start + i] = 1
        queried[i, total + i] = 1

    def embedded(ids: list[int], first: int) -> torch.Tensor:
        places = list(range(first, first + len(ids)))
        own = {name: rows[first : first + len(ids)] for name, rows in types.items()}
        tables = {"word": ids, **own, "pos": places}
        summed = sum(arrays[f"{name}_embedding"][torch.tensor(tables[name])] for name in tables)
        return norm(arrays, "pre_encoder_layer_norm", torch.as_tensor(summed), eps)

    def layer(name: str, x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = lambda y: y.view(len(y), HEADS, -1).transpose(0, 1)  # noqa: E731
        q = heads(dense(arrays, f"{name}_multi_head_att_query_fc", x))
        k = heads(dense(arrays, f"{name}_multi_head_att_key_fc", keys))
        v = heads(dense(arrays, f"{name}_multi_head_att_value_fc", keys))
        scores = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(1, 2) + (mask - 1) * 1e4
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), WIDTH)
        mixed = dense(arrays, f"{name}_multi_head_att_output_fc", mixed)
        x = norm(arrays, f"{name}_post_att_layer_norm", x + mixed, eps)
        inner = dense(arrays, f"{name}_ffn_fc_1", F.gelu(dense(arrays, f"{name}_ffn_fc_0", x)))
        return norm(arrays, f"{name}_post_ffn_layer_norm", x + inner, eps)

    context = embedded([*SOURCE, *TARGET], 0)
    query = embedded([FRAME.query] * many, start)
    for number in range(LAYERS):
        name = f"encoder_layer_{number}"
        both = torch.cat([context, query])
        context, query = layer(name, context, context, seen), layer(name, query, both, queried)
    rows = F.gelu(dense(arrays, "mask_lm_trans_fc", query[1:]))
    rows = norm(arrays, "mask_lm_trans_layer_norm", rows, eps)
    return rows @ arrays["word_embedding"].T + arrays["mask_lm_out_fc.b_0"]


# ---- the same by palm_ds ----


def modules(contents: CheckpointContents) -> tuple[Any, MaskedLMHead]:
    encoder = build_encoder(contents.config).eval()
    head = MaskedLMHead(encoder).eval()
    state = {name: entry.read() for name, entry in contents.entries.items()}
    for module, prefix in ((encoder, "backbone."), (head, "heads.masked_words.")):
        own = {x.removeprefix(prefix): y for x, y in state.items() if x.startswith(prefix)}
        lacking = module.load_state_dict(own, strict=False).missing_keys
        assert [name for name in lacking if not name.startswith("pooler.")] == []
    return encoder, head


@torch.inference_mode()
def packed_scores(
    encoder: Any,
    head: MaskedLMHead,
    segments: Sequence[int] = SEGMENTS,
    target_type: int = TARGET_TYPE,
) -> torch.Tensor:
    """All queries in one pass."""
    many, start = len(TARGET), len(SOURCE)
    text = PackedText(
        input_ids=np.array([*SOURCE, *TARGET, *[FRAME.query] * (many - 1)]),
        token_type_ids=np.array([*segments, *[target_type] * (2 * many - 1)]),
        position_ids=np.array([*range(start + many), *range(start + 1, start + many)]),
        visibility=multi_flow(start, many, [np.arange(1, many)]),
    )
    length = start + 2 * many - 1
    batch = Batch.from_rows([[text]], length=length, pad=0)
    return head.logits(encoder(batch)[0, start + many :])


@torch.inference_mode()
def decoded_scores(encoder: Any, head: MaskedLMHead) -> torch.Tensor:
    """Token by token, as texts are generated."""
    source = PackedText(input_ids=np.array(SOURCE), token_type_ids=np.array(SEGMENTS))
    prompt = Prompt(source=source, position=len(SOURCE))
    decoder = CachedDecoder(encoder, head.logits, [prompt], FRAME)
    return torch.cat([decoder.step(torch.tensor([token])) for token in TARGET[:-1]])


@pytest.mark.parametrize("era", [static_folder, dygraph_folder])
def test_scores_are_those_of_the_released_equations(era: Callable, tmp_path: Path) -> None:
    contents = open_checkpoint(era(tmp_path / "gen"))
    assert contents.config.task_types == 0 and contents.config.token_types == 4
    assert list(contents.heads) == ["masked_words"]
    assert any("no pooler" in note for note in contents.notes)
    encoder, head = modules(contents)
    wanted = flows()
    assert torch.allclose(packed_scores(encoder, head), wanted, atol=1e-4)
    assert torch.allclose(decoded_scores(encoder, head), wanted, atol=1e-4)


def test_the_eps_and_the_activation_of_the_static_graph(tmp_path: Path) -> None:
    told = {**CONFIG, "epsilon": 1e-3, "hidden_act": "gelu.precise", "postprocess_cmd": "dan"}
    contents = open_checkpoint(static_folder(tmp_path / "gen", told))
    assert contents.config.layer_norm_eps == 1e-3 and contents.config.activation == "gelu"
    assert torch.allclose(packed_scores(*modules(contents)), flows(1e-3), atol=1e-4)


def test_to_hugging_face_and_back(tmp_path: Path) -> None:
    folder = dygraph_folder(tmp_path / "gen")
    convert(folder, tmp_path / "hf", to="huggingface")
    model = BertForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert model.config.type_vocab_size == 4 and model.config.max_position_embeddings == PLACES
    encoder, head = modules(open_checkpoint(folder))
    again, head_again = modules(open_checkpoint(tmp_path / "hf"))
    assert torch.equal(packed_scores(encoder, head), packed_scores(again, head_again))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"preprocess_cmd": "n"}, "preprocess_cmd: must be '' here, got 'n'"),
        ({"param_share": "inner_share"}, "param_share: must be 'normal' here"),
    ],
)
def test_other_architectures_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = static_folder(tmp_path / "gen", {**CONFIG, **changed})
    with pytest.raises(UserError, match=message):
        open_checkpoint(folder)


def test_roles_and_turns_of_dialogue_models_are_token_types(tmp_path: Path) -> None:
    contents = open_checkpoint(static_folder(tmp_path / "gen", dialogue=True))
    assert contents.config.token_types == 6
    assert contents.entries["backbone.segment.weight"].transform == "sums of turn and role"
    found = packed_scores(*modules(contents), [3, 5, 5, 5, 3, 2, 2, 1], target_type=0)
    assert torch.allclose(found, flows(types=DIALOGUE), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("turn_embedding", None, "has role_embedding and turn_embedding, and no sent_embedding"),
        ("sent_embedding", (4, WIDTH), "has role_embedding and turn_embedding, and no sent_emb"),
        ("role_embedding", (1, WIDTH), r"role_embedding \(1, 16\) does not fit turn_embedding"),
    ],
)
def test_damaged_dialogue_models(
    name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    folder = static_folder(tmp_path / "gen", dialogue=True)
    if shape is None:
        (folder / "params" / name).unlink()
    else:
        write_folder(folder / "params", {name: np.zeros(shape, np.float32)})
    with pytest.raises(UserError, match=message):
        open_checkpoint(folder)
