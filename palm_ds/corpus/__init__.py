"""Raw text in, memory-mapped documents with marks out.

inputs      files, folders and names to sources of documents, cut into units of work
words       a document's text to words, through a table of everything known about a word
sentences   where sentences begin
knowledge   phrases and entities: lexicons, collocations, capitalised runs, Chinese names
marks       one uint8 a token, from the above; tasks bring their own
build       units to shards: workers, machines, resuming, the manifest
store       the finished corpus, read by token offsets
"""
