"""The model: configuration, encoder, heads, and the kernels they run on."""
