"""Downloads of published models: HTTP, archives, the Hugging Face hub."""
