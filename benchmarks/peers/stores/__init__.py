"""Other stores of key-value states under ``memstore torture``, each with the calls that its own users make.

    pip install MemoryOS
    memstore torture benchmarks.peers.stores.memos:MemOS --rounds 40
    pip install llama-cpp-python gguf
    memstore torture benchmarks.peers.stores.llamacpp:Slots --rounds 40
    pip install --no-deps lmcache    # its other dependencies without those of CUDA
    memstore torture benchmarks.peers.stores.lmcache:LocalDisk --fault restart --rounds 40

Fair: the versions and defaults of each are used, and what is written is written as its own code writes it. A module
imports its store at once: each round forks, and would import it again.
"""
