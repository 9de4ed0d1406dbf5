"""A memory inside a stock Hugging Face causal LM."""
