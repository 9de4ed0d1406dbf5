"""Questions that people asked, whose evidence is known: what is found for them, and what is answered.

Each module of a benchmark has one function, ``load``, which makes a ``QuestionSet``. What is measured with it knows
nothing of where it came from: ``recall``, and the ways to find a passage in ``rankers``.
"""
