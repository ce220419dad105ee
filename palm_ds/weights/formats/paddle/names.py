"""Maps the parameter names of ERNIE, PALM and PaddleNLP to palm_ds's: one table per era.

A Paddle name becomes a `TensorRole`, with palm_ds's parameter name except for

    backbone.layers.N.{query,key,value}.*    three tensors, one `qkv` in palm_ds
    heads.NAME.table, heads.NAME.bias_copy   the masked-LM head's output embeddings, its bias again

and `pooled`: whether a classification head reads whole texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.positions import GRAM_BUCKETS
from palm_ds.weights.formats.huggingface.architecture import CLASSIFIER, MASKED_WORDS, NEXT_SENTENCE

REGIONS = "referring_expressions"
"""Our name of the head of a region's score."""
_LINEAR = {
    *("dense", "query", "key", "value", "project", "expand", "contract", "out"),
    *("distance_map", "type_map", "feature", "location", "co_query", "co_key", "co_value"),
    *("hidden", "score"),
}
_VECTORS = ("content_bias", "distance_bias", "type_bias")
"""Parameters that are no module's weight or bias."""
_LAYER = re.compile(
    r"(encoder_(?:v|co)?layer_|encoder_stack\.block\.|encoder\.layers\.)(\d+)(?=[._])"
)


@dataclass(frozen=True)
class TensorRole:
    """The role of a Paddle tensor in a palm_ds model."""

    name: str
    pooled: bool = True

    @property
    def transposed(self) -> bool:
        """Linear weights are (in, out) in Paddle and (out, in) in palm_ds."""
        module, _, end = self.name.rpartition(".")
        return end == "weight" and module.rpartition(".")[2] in _LINEAR


@dataclass(frozen=True, kw_only=True)
class NamingScheme:
    """The names of one era. `word` is the name of the token embeddings."""

    title: str
    word: str
    modules: Mapping[str, str]
    """{Paddle module: palm_ds module}, with {} for the layer number."""
    split: Callable[[str], tuple[str, str]]
    """Splits a Paddle name into its module and `weight`, `bias` or nothing."""
    head: Callable[[str, str, str], TensorRole | None]
    """(module, end, name) -> the role in a head."""

    def role(self, name: str) -> TensorRole | None:
        """The role of the tensor with this name; None if it has none."""
        module, end = self.split(name)
        numbers = _LAYER.search(module)
        general = _LAYER.sub(r"\1{}", module, count=1)
        if general in self.modules:
            target = self.modules[general].format(numbers[2] if numbers else "")
            if target.endswith(_VECTORS):
                return TensorRole(f"backbone.{target}")
            return TensorRole(f"backbone.{target}.{end or 'weight'}")
        return self.head(module, end, name)


def _dotted(name: str) -> tuple[str, str]:
    module, _, end = name.rpartition(".")
    return (module, end) if end in ("weight", "bias") else (name, "")


# ---- ERNIE's static graph, PALM ----

_STATIC_ENDS = {".w_0": "weight", ".b_0": "bias", "_scale": "weight", "_bias": "bias"}
_STATIC = {
    "word_embedding": "word",
    "pos_embedding": "position",
    "sent_embedding": "segment",
    "task_embedding": "task",
    "rel_pos_embedding": "relative_bias",
    "role_embedding": "role",
    "turn_embedding": "turn",
    "pre_encoder_layer_norm": "norm",
    "pre_encoder_emb_layer_norm": "norm",  # ERNIE-Doc
    "pre_encoder_r_pos_layer_norm": "position_norm",
    "pre_encoder_r_task_layer_norm": "segment_norm",
    "pooled_fc": "pooler.dense",
    "pooled_fc_text": "pooler.dense",  # UNIMO and ERNIE-ViL, as all of images
    "pooled_fc_image": "region_pooler.dense",
    "image_emb": "region.feature",
    "image_loc": "region.location",
    "v_pre_encoder_layer_norm": "region.norm",
    "encoder_layer_{}_multi_head_att_query_fc": "layers.{}.query",
    "encoder_layer_{}_multi_head_att_key_fc": "layers.{}.key",
    "encoder_layer_{}_multi_head_att_value_fc": "layers.{}.value",
    "encoder_layer_{}_multi_head_att_output_fc": "layers.{}.project",
    "encoder_layer_{}_post_att_layer_norm": "layers.{}.attention_norm",
    "encoder_layer_{}_ffn_fc_0": "layers.{}.expand",
    "encoder_layer_{}_ffn_fc_1": "layers.{}.contract",
    "encoder_layer_{}_post_ffn_layer_norm": "layers.{}.output_norm",
}
_STATIC_DOC = {
    "encoder_layer_{}_multi_head_att_pos_fc": "layers.{}.distance_map",
    "encoder_layer_{}_multi_head_att_task_fc": "layers.{}.type_map",
    "encoder_layer_{}_multi_head_att_r_w": "layers.{}.content_bias",
    "encoder_layer_{}_multi_head_att_r_r": "layers.{}.distance_bias",
    "encoder_layer_{}_multi_head_att_r_t": "layers.{}.type_bias",
}
_STATIC_STREAM = {
    "encoder_vlayer_{}" + their.removeprefix("encoder_layer_{}"): f"image_{our}"
    for their, our in _STATIC.items()
    if our.startswith("layers.")
}
_STATIC_CO = {
    f"encoder_colayer_{{}}{stream}_{their}": f"co_layers.{{}}.{part}.{our}"
    for stream, part in (("", "text"), ("_vl", "image"))
    for their, our in {
        "multi_head_att_query_fc": "co_query",
        "multi_head_att_key_fc": "co_key",
        "multi_head_att_value_fc": "co_value",
        "multi_head_att_output_fc": "project",
        "post_att_layer_norm": "attention_norm",
        "ffn_fc_0": "expand",
        "ffn_fc_1": "contract",
        "post_ffn_layer_norm": "output_norm",
    }.items()
}
_STATIC_VIL = {"vl_pre_encoder_layer_norm": "region.norm", **_STATIC_STREAM, **_STATIC_CO}
"""Of ERNIE-ViL: its stream of regions, and co-attention."""
_STATIC_WORDS = re.compile(r"(?:(.+)\.)?mask_lm_(trans_fc|trans_layer_norm|out_fc)")
_STATIC_CLASSES = re.compile(r"(?:(.+)[._])?cls_(\w+_)?out_(?:\d+_)?([wb])")
_STATIC_QUESTIONS = re.compile(r"(.+)_fc_([wb])_([01])")
"""The two layers of ERNIE-ViL's head of questions."""
_STATIC_REGIONS = re.compile(r"cls_seq_label_vl_out_([wb])")
"""ERNIE-ViL's score of a region."""
_STATIC_PARTS = {"trans_fc": "dense", "trans_layer_norm": "norm"}


def _split_static(name: str) -> tuple[str, str]:
    for ending, end in _STATIC_ENDS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), end
    return name, ""


def _static_head(module: str, end: str, name: str) -> TensorRole | None:
    if words := _STATIC_WORDS.fullmatch(module):
        head = plain(words[1] or MASKED_WORDS)
        if words[2] == "out_fc":
            return TensorRole(f"heads.{head}.{'bias' if end == 'bias' else 'table'}")
        return TensorRole(f"heads.{head}.{_STATIC_PARTS[words[2]]}.{end}")
    if regions := _STATIC_REGIONS.fullmatch(name):
        ending = "weight" if regions[1] == "w" else "bias"
        return TensorRole(f"heads.{REGIONS}.score.{ending}", pooled=False)
    if classes := _STATIC_CLASSES.fullmatch(name):
        head = plain(classes[1] or CLASSIFIER)
        ending = "weight" if classes[3] == "w" else "bias"
        return TensorRole(f"heads.{head}.out.{ending}", pooled=not classes[2])
    if crf := re.fullmatch(r"(?:(.+)[._])?crfw", name):
        return TensorRole(f"heads.{plain(crf[1] or 'classifier')}.crf.transitions")
    if layer := _STATIC_QUESTIONS.fullmatch(name):
        part, ending = ("hidden", "out")[int(layer[3])], "weight" if layer[2] == "w" else "bias"
        return TensorRole(f"heads.{plain(layer[1])}.{part}.{ending}")
    encoder = "encoder_layer_" in module or module.endswith("pooled_fc")  # of a second encoder
    if end and module.endswith("_fc") and not encoder:
        task = module.removesuffix("_fc")
        head = NEXT_SENTENCE if task == "next_sent" else plain(task)
        return TensorRole(f"heads.{head}.out.{end}")
    return None


STATIC = NamingScheme(
    title="ERNIE",
    word="word_embedding",
    modules=_STATIC | _STATIC_DOC | _STATIC_VIL,
    split=_split_static,
    head=_static_head,
)

_OTHERS = ("pooled_fc", "pre_encoder_emb_layer_norm")
"""Names of other encoders for what those of images have, too."""
_STATIC_WORDS_OF = {
    "dense.weight": "mask_lm_trans_fc.w_0",
    "dense.bias": "mask_lm_trans_fc.b_0",
    "norm.weight": "mask_lm_trans_layer_norm_scale",
    "norm.bias": "mask_lm_trans_layer_norm_bias",
    "bias": "mask_lm_out_fc.b_0",
}


def static_names(ours: Iterable[str], words: str) -> dict[str, tuple[str, ...]]:
    """{palm_ds name: names in the static graph of an encoder of images} of those that it has, of
    its masked-LM head `words` too. The parts of a qkv matrix have a name each."""
    ours = list(ours)
    every = _STATIC | (_STATIC_VIL if any("co_layers." in name for name in ours) else {})
    modules = {y: x for x, y in every.items() if x not in _OTHERS}
    found: dict[str, tuple[str, ...]] = {}
    for name in ours:
        module, _, end = name.removeprefix("backbone.").rpartition(".")
        number = re.search(r"\.(\d+)\.", f".{module}.")
        general = re.sub(r"(?<=\.)\d+(?=\.)", "{}", module)
        stems = [general.replace("qkv", part) for part in ("query", "key", "value")]
        others = [modules.get(stem, "") for stem in dict.fromkeys(stems)]
        if name.startswith("backbone.") and all(others):
            number = number[1] if number else ""
            found[name] = tuple(_static_end(x.format(number), end) for x in others)
        elif words and (part := _STATIC_WORDS_OF.get(name.removeprefix(f"heads.{words}."))):
            found[name] = (part,)
    return found


def _static_end(module: str, end: str) -> str:
    if module.endswith("_embedding"):
        return module
    if module.endswith("norm"):
        return f"{module}_scale" if end == "weight" else f"{module}_bias"
    return f"{module}.w_0" if end == "weight" else f"{module}.b_0"


# ---- ERNIE's dygraph ----

_DYGRAPH = {
    "word_emb": "word",
    "pos_emb": "position",
    "sent_emb": "segment",
    "task_emb": "task",
    "rel_pos_bias_emb": "relative_bias",
    "ln": "norm",
    "pooler": "pooler.dense",
    "encoder_stack.block.{}.attn.q": "layers.{}.query",
    "encoder_stack.block.{}.attn.k": "layers.{}.key",
    "encoder_stack.block.{}.attn.v": "layers.{}.value",
    "encoder_stack.block.{}.attn.o": "layers.{}.project",
    "encoder_stack.block.{}.ln1": "layers.{}.attention_norm",
    "encoder_stack.block.{}.ffn.i": "layers.{}.expand",
    "encoder_stack.block.{}.ffn.o": "layers.{}.contract",
    "encoder_stack.block.{}.ln2": "layers.{}.output_norm",
}
_DYGRAPH_HEADS = {
    "mlm": f"{MASKED_WORDS}.dense",
    "mlm_ln": f"{MASKED_WORDS}.norm",
    "pooler_heads.0.nsp": f"{NEXT_SENTENCE}.out",
    "classifier": f"{CLASSIFIER}.out",
}


def _dygraph_head(module: str, end: str, name: str) -> TensorRole | None:
    if name == "mlm_bias":
        return TensorRole(f"heads.{MASKED_WORDS}.bias")
    head = _DYGRAPH_HEADS.get(module) if end else None
    return TensorRole(f"heads.{head}.{end}") if head else None


DYGRAPH = NamingScheme(
    title="ERNIE develop",
    word="word_emb.weight",
    modules=_DYGRAPH,
    split=_dotted,
    head=_dygraph_head,
)

# ---- PaddleNLP ----

NLP_MODULES = {
    "embeddings.word_embeddings": "word",
    "embeddings.position_embeddings": "position",
    "embeddings.token_type_embeddings": "segment",
    "embeddings.task_type_embeddings": "task",
    "embeddings.rel_pos_embeddings": "relative_bias",
    "embeddings.layer_norm": "norm",
    "encoder_norm": "norm",  # UNIMO
    "pooler.dense": "pooler.dense",
    "encoder.layers.{}.self_attn.q_proj": "layers.{}.query",
    "encoder.layers.{}.self_attn.k_proj": "layers.{}.key",
    "encoder.layers.{}.self_attn.v_proj": "layers.{}.value",
    "encoder.layers.{}.self_attn.out_proj": "layers.{}.project",
    "encoder.layers.{}.norm1": "layers.{}.attention_norm",
    "encoder.layers.{}.linear1": "layers.{}.expand",
    "encoder.layers.{}.linear2": "layers.{}.contract",
    "encoder.layers.{}.norm2": "layers.{}.output_norm",
}
_CLS_WORDS = {  # of Bert and Ernie
    "cls.predictions.transform": "dense",
    "cls.predictions.layer_norm": "norm",
    "cls.predictions.decoder_bias": "bias",
    "cls.predictions.decoder.weight": "table",
    "cls.predictions.decoder_weight": "table",
    "cls.predictions.decoder.bias": "bias_copy",
}
_LM_WORDS = {  # of Roberta
    "lm_head.dense": "dense",
    "lm_head.layer_norm": "norm",
    "lm_head.bias": "bias",
    "lm_head.decoder.weight": "table",
    "lm_head.decoder_weight": "table",
    "lm_head.decoder.bias": "bias_copy",
}
_UNIMO_WORDS = {
    "lm_head.transform": "dense",
    "lm_head.decoder_bias": "bias",
}
_NLP_CLASSES = {
    "cls.seq_relationship": NEXT_SENTENCE,
    "classifier": CLASSIFIER,
    "classifier.out_proj": CLASSIFIER,  # Roberta's text classifier
}
OWN_POOLER = "classifier.dense"  # Roberta's text classifier has the pooler


def _nlp_head(module: str, end: str, name: str) -> TensorRole | None:
    words = _CLS_WORDS | _LM_WORDS | _UNIMO_WORDS
    if name in words:
        return TensorRole(f"heads.{MASKED_WORDS}.{words[name]}")
    if end and module in words:
        return TensorRole(f"heads.{MASKED_WORDS}.{words[module]}.{end}")
    if end and module == OWN_POOLER:
        return TensorRole(f"backbone.pooler.dense.{end}")
    if end and module in _NLP_CLASSES:
        return TensorRole(f"heads.{_NLP_CLASSES[module]}.out.{end}")
    return None


PADDLENLP = NamingScheme(
    title="PaddleNLP",
    word="embeddings.word_embeddings.weight",
    modules=NLP_MODULES,
    split=_dotted,
    head=_nlp_head,
)

_NLP_DOC = {
    "embeddings.word_emb": "word",
    "embeddings.pos_emb": "position",
    "embeddings.token_type_emb": "segment",
    "embeddings.norms.0": "norm",
    "embeddings.norms.1": "position_norm",
    "embeddings.norms.2": "segment_norm",
    "pooler.dense": "pooler.dense",
    "encoder.layers.{}.attn.q_proj": "layers.{}.query",
    "encoder.layers.{}.attn.k_proj": "layers.{}.key",
    "encoder.layers.{}.attn.v_proj": "layers.{}.value",
    "encoder.layers.{}.attn.r_proj": "layers.{}.distance_map",
    "encoder.layers.{}.attn.t_proj": "layers.{}.type_map",
    "encoder.layers.{}.attn.r_w_bias": "layers.{}.content_bias",
    "encoder.layers.{}.attn.r_r_bias": "layers.{}.distance_bias",
    "encoder.layers.{}.attn.r_t_bias": "layers.{}.type_bias",
    "encoder.layers.{}.attn.out_proj": "layers.{}.project",
    "encoder.layers.{}.norm1": "layers.{}.attention_norm",
    "encoder.layers.{}.ffn.linear1": "layers.{}.expand",
    "encoder.layers.{}.ffn.linear2": "layers.{}.contract",
    "encoder.layers.{}.norm2": "layers.{}.output_norm",
}


def _nlp_doc_head(module: str, end: str, name: str) -> TensorRole | None:
    return TensorRole(f"heads.{CLASSIFIER}.out.{end}") if end and module == "linear" else None


PADDLENLP_DOC = NamingScheme(
    title="PaddleNLP",
    word="embeddings.word_emb.weight",
    modules=_NLP_DOC,
    split=_dotted,
    head=_nlp_doc_head,
)

NAMING_SCHEMES = (PADDLENLP, PADDLENLP_DOC, DYGRAPH, STATIC)
NLP_SCHEMES = (PADDLENLP, PADDLENLP_DOC)


def plain(name: str) -> str:
    """A valid name for a palm_ds head: PALM's may contain dots."""
    return name.replace(".", "_")


# ---- combined files, which contain no names ----

_RELATIVE = "rel_pos_embedding"
_USUAL_MORE = (  # optional parts of ERNIE's static graphs
    ("task_embedding",),
    ("pooled_fc.w_0", "pooled_fc.b_0"),
    (
        "mask_lm_trans_fc.w_0",
        "mask_lm_trans_fc.b_0",
        "mask_lm_trans_layer_norm_scale",
        "mask_lm_trans_layer_norm_bias",
        "mask_lm_out_fc.b_0",
    ),
    ("mask_lm_out_fc.w_0",),
    ("next_sent_fc.w_0", "next_sent_fc.b_0"),
    ("cls_out_w", "cls_out_b"),
    (_RELATIVE,),
)


def _usual_names(layers: int) -> Iterator[list[str]]:
    """The sets of names that a combined ERNIE file may contain, each in the file's order."""
    encoder = ["word_embedding", "pos_embedding", "sent_embedding"]
    encoder += ["pre_encoder_layer_norm_scale", "pre_encoder_layer_norm_bias"]
    for module in [module for module in _STATIC if "{}" in module]:
        ends = ("_scale", "_bias") if module.endswith("norm") else (".w_0", ".b_0")
        encoder += [module.format(layer) + end for layer in range(layers) for end in ends]
    for chosen in product((False, True), repeat=len(_USUAL_MORE)):
        more = [names for names, taken in zip(_USUAL_MORE, chosen, strict=True) if taken]
        if _USUAL_MORE[3] not in more or _USUAL_MORE[2] in more:
            yield sorted([*encoder, *(name for names in more for name in names)])


def combined_names(
    shapes: Sequence[tuple[int, ...]], values: Mapping[str, Any], where: str
) -> list[str]:
    """The names of a combined file's variables, which are sorted by name in the file.

    They are the names in one of ERNIE's graphs with this config, if exactly one graph has these
    shapes. Raises UserError, with `where` as its prefix, otherwise.
    """
    numbers: list[Any] = [values.get(x) for x in ("hidden_size", "num_hidden_layers", "vocab_size")]
    if not all(type(number) is int and number > 0 for number in numbers) or numbers[1] > len(
        shapes
    ):
        raise UserError(
            f"{where}: {len(shapes)} variables without names, and the config has no valid "
            "hidden_size, num_hidden_layers and vocab_size"
        )
    width, layers, words = numbers
    fitting = [names for names in _usual_names(layers) if _fit(names, shapes, width, words)]
    if len(fitting) == 1:
        return fitting[0]
    why = "more than one" if fitting else "none"
    raise UserError(
        f"{where}: {len(shapes)} variables without names, and {why} of ERNIE's graphs has these "
        "shapes with this config; give names="
    )


def _fit(names: list[str], shapes: Sequence[tuple[int, ...]], width: int, words: int) -> bool:
    """Whether variables with these names can have these shapes."""
    if len(names) != len(shapes):
        return False
    expected = [_expected_shape(name, width, words) for name in names]
    return all(
        len(wanted) == len(actual)
        and all(a is None or a == b for a, b in zip(wanted, actual, strict=True))
        for wanted, actual in zip(expected, shapes, strict=True)
    )


def _expected_shape(name: str, width: int, words: int) -> tuple[int | None, ...]:
    """The shape of a variable; None for any number of rows or classes."""
    if name == _RELATIVE:
        return GRAM_BUCKETS, None
    if name.endswith("_embedding"):
        return (words if name == STATIC.word else None), width
    if name.startswith(("next_sent_fc", "cls_out")):
        classes = 2 if name.startswith("next_sent_fc") else None
        return (classes,) if name.endswith(("b_0", "_b")) else (width, classes)
    if name.startswith("mask_lm_out_fc"):
        return (words,) if name.endswith("b_0") else (width, words)
    rows = 4 * width if "ffn_fc_1" in name else width
    columns = 4 * width if "ffn_fc_0" in name else width
    return (rows, columns) if name.endswith("w_0") else (columns,)
