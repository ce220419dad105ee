"""Search over texts: by vectors, by words, or both, among those that a filter allows."""
