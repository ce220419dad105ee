"""Parts of a step: gradient accumulation, gradient caching, prefetching, its result."""
