"""Trainable language models around the layers of ``memstore.attention``, as Hugging Face models.

They need transformers: ``pip install "torch-memstore[hf]"``.
"""
