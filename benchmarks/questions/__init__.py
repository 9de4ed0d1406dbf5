"""People's questions with known evidence: which blocks are found for them, and how well a model answers.

Most modules have a function ``load``, which makes a ``QuestionSet`` (``conversations`` has two; ``ruler`` measures by
itself). What measures does not know where a set came from: ``memstore.train.questions.recall``, and ``rankers``.
"""
