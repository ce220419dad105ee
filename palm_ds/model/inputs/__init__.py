"""The tensors that a model is called with."""
