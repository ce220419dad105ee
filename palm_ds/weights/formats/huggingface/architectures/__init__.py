"""How Hugging Face's programs have our encoders: a file for each architecture."""
