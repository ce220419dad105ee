"""Items to packed rows: orders, counts, packing, stages and the curriculum."""
