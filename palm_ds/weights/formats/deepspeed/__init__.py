"""Checkpoints that DeepSpeed itself wrote."""
