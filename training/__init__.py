"""Training of the packaged code model: corpus, tokenizer, model, optimiser, export, evaluation. See README.md."""
