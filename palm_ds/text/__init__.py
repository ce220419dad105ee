"""Strings to tokens: tokenizers, words, sentences, phrases."""
