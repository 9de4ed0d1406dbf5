"""People's questions with known evidence: which blocks are found for them, and how well a model answers.

The module of each benchmark has one function, ``load``, which makes a ``QuestionSet``. The measurements do not know
where a set came from: ``memstore.train.questions.recall``, and the ways to find a passage in ``rankers``.
"""
