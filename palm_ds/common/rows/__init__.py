"""Rows of files of any format: lines, cells, JSON, Arrow; for corpora and for tables."""
