"""The torture test of stores of key-value states, and other stores under it, with the calls that their own users make.

``python -m benchmarks.torture benchmarks.torture.memos:MemOS``. Fair: the versions and defaults of each are used,
and what is written is written as its own code writes it. A module imports its store at once: each round forks, and
would import it again.
"""
