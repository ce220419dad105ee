"""The model: its configuration, encoder and heads, and the kernels that compute them."""
