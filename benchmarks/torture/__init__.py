"""Other stores of key-value states under ``memstore torture``, each with the calls that its own users make.

From a checkout: ``memstore torture benchmarks.torture.memos:MemOS``. Fair: the versions and defaults of each are used,
and what is written is written as its own code writes it. A module imports its store at once: each round forks, and
would import it again.
"""
