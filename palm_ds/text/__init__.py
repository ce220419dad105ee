"""Text processing: tokenizers, words, sentences, headings, phrases."""
