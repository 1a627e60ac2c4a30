"""An agent: model, tokenizer, optimiser, sampling engine, and where they run."""
