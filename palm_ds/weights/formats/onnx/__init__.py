"""Checkpoints as ONNX files: written, checked in ONNX Runtime, never read back."""
