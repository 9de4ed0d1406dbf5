"""The same work by memstore and by what would be used instead, each in an environment of its own."""
