"""The command line. ``app`` lists the verbs; each has a short file of its own."""
