"""Ways to a memory: what reads a text into it with a model, and lets the model see it."""
