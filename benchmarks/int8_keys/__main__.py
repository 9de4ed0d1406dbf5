"""``python -m benchmarks.int8_keys``."""

from benchmarks.int8_keys import main

main()
