"""The command line: the library spoken aloud. ``app`` holds the verbs, one short file each."""
