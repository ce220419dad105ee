"""Decides which documents of an input are dropped: copies of others, and those of low quality."""
