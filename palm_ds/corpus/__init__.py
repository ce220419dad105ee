"""Turns raw text into a memory-mapped corpus of tokens with annotations.

input           finds input files, splits them into work units and reads their records
analyzer        turns a record into a document: tokens, words, sentences, phrases, entities
annotations     derives one uint8 per token from a document; tasks can add their own
prepare         writes work units to shards: workers, machines, resuming, the manifest
add_annotation  adds annotations to an existing corpus
store           reads the finished corpus by token offsets
"""
