"""A mechanism of its own: the kNN-LM (Khandelwal et al. 2020, "Generalization through Memorization").

A language model keeps the hidden state of every token that it has read. While it writes, the tokens that came after the
nearest stored states vote for the next one. docs/own_mechanism.md walks through the files.
"""
