"""Paddle checkpoints: ERNIE, PaddlePALM, PaddleNLP."""
