"""BERT, ERNIE and RoBERTa: a transformer with learned positions and norms after each half."""

from __future__ import annotations

from palm_ds.model.encoder.transformer import TransformerEncoder


class Bert(TransformerEncoder):
    """The encoder of a recipe that names no other."""

    hf = "bert"
