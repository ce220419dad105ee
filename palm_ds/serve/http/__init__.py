"""The only door to FastAPI and uvicorn."""
