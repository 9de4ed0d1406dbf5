"""A memory for a stock Hugging Face causal LM."""
