"""Other stores of key-value states under ``memstore torture``, each with the calls that its own users make.

Fair: the versions and defaults of each are used, and what is written is written as its own code writes it. A module
imports its store at once: each round forks, and would import it again.
"""

PEERS = {
    "memos": ("memstore.testing.peers.memos:MemOS", "pip install MemoryOS==2.0.33"),
    "llama.cpp": ("memstore.testing.peers.llamacpp:Slots", "pip install llama-cpp-python==0.3.36 gguf"),
    "lmcache": (
        "memstore.testing.peers.lmcache:LocalDisk",
        "pip install --no-deps lmcache==0.5.6, and of its other dependencies those that are not of CUDA",
    ),
}
"""By the name that the command knows them by: the class, and what it needs."""
