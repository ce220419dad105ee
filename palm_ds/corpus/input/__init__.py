"""Input formats of a corpus: which files there are, and their records."""
