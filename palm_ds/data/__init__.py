"""Corpora and tables to the packed rows of a step."""
