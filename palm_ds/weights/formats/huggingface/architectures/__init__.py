"""Our encoders as Hugging Face's programs have them, one file per architecture."""
