"""Families of models with an index of their own, each described as ``memstore.models.indexed.family`` asks."""
