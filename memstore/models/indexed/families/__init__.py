"""Families of models with their own index; ``memstore.models.indexed.family`` has their contract."""
