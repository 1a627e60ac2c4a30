"""Engines sample responses: transformers (the default) or vLLM (optional)."""
