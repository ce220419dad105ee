"""Sources of items: corpora, tables, mixtures, rows handed over by Python."""
