"""Look-alikes: eight sentences of one form, hidden in a manual, differ in two words. One is asked for.

The right block is easily found, and so are the wrong ones. So the measure is whether the model takes the answer from
the right one. All sentences of a form are in the same half.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.questions.manual import hidden, paragraphs
from memstore.train.questions import Question, QuestionSet

SOURCE = "look-alikes of memstore's own in Python's language reference (PSF licence)"
CHARACTERS = 32_000
"""Characters of the manual: with the sentences about 8,500 tokens."""
PARAGRAPH = 300
"""Characters between two sentences, at least."""


class _Form(NamedTuple):
    """A sentence and a question with gaps, and the words for them: the name that is asked for, and the answer."""

    name: str
    sentence: str
    question: str
    pairs: dict[str, str]


FORMS = (
    _Form(
        "masters",
        "The name of the harbour master of Port {} is {}.",
        "What is the name of the harbour master of Port {}?",
        {"Salter": "Margaret", "Brine": "Tobias", "Hollow": "Eleanor", "Marrow": "Frederick", "Quill": "Beatrice",
         "Ember": "Leopold", "Thistle": "Harriet", "Wending": "Dominic"},
    ),
    _Form(
        "lockers",
        "The number of the locker of {} is {}.",
        "What is the number of the locker of {}?",
        {"Agnes": "4187", "Bruno": "2953", "Cecil": "7614", "Dagmar": "3380", "Edwin": "9026", "Flora": "5741",
         "Gustav": "1868", "Hilda": "6295"},
    ),
    _Form(
        "dogs",
        "The dog of Mrs. {} is called {}.",
        "What is the dog of Mrs. {} called?",
        {"Abbott": "Biscuit", "Carver": "Pepper", "Dawson": "Rufus", "Fletcher": "Nero", "Granger": "Daisy",
         "Hobbs": "Captain", "Lambert": "Oscar", "Merton": "Ginger"},
    ),
    _Form(
        "treasures",
        "The treasure of Captain {} is buried near {}.",
        "Where is the treasure of Captain {} buried?",
        {"Moraine": "Lisbon", "Drake": "Cairo", "Voss": "Dublin", "Silver": "Havana", "Kidd": "Athens",
         "Bellamy": "Lima", "Rackham": "Oslo", "Teach": "Prague"},
    ),
    _Form(
        "houses",
        "The house of the {} family is painted {}.",
        "In which colour is the house of the {} family painted?",
        {"Ashdown": "green", "Birch": "yellow", "Corbett": "blue", "Dunmore": "red", "Everett": "white",
         "Falkner": "orange", "Gould": "purple", "Hale": "grey"},
    ),
    _Form(
        "instruments",
        "On Sundays little {} plays the {}.",
        "Which instrument does little {} play on Sundays?",
        {"Anna": "violin", "Boris": "trumpet", "Clara": "harp", "David": "cello", "Emil": "piano", "Fanny": "flute",
         "Georg": "guitar", "Helen": "organ"},
    ),
    _Form(
        "lectures",
        "The lecture on {} takes place in room {}.",
        "In which room does the lecture on {} take place?",
        {"botany": "214", "geology": "305", "poetry": "118", "logic": "427", "optics": "236", "anatomy": "509",
         "ethics": "143", "algebra": "362"},
    ),
    _Form(
        "birthdays",
        "The birthday of cousin {} is in {}.",
        "In which month is the birthday of cousin {}?",
        {"Ida": "January", "Jonas": "March", "Karla": "April", "Ludwig": "June", "Mina": "July", "Nils": "August",
         "Olga": "October", "Paul": "December"},
    ),
)  # fmt: skip


def load(manual: str | None = None, *, seed: int = 0) -> QuestionSet:
    """Load the look-alikes among the paragraphs of ``manual`` (default: Python's language reference), shuffled.

    Every other ``seed`` makes them anew: each name gets the answer of another, and they are hidden elsewhere. Raises
    ``NotFound`` if this Python has no reference.
    """
    chance = random.Random(seed)
    alike = []
    for form in FORMS:
        names, answers = [*form.pairs], [*form.pairs.values()]
        if seed:
            chance.shuffle(answers)
        alike += [(form, *pair) for pair in zip(names, answers, strict=True)]
    chance.shuffle(alike)
    sentences = [form.sentence.format(who, answer) for form, who, answer in alike]
    pool, numbers = hidden(sentences, paragraphs(CHARACTERS, PARAGRAPH, manual), chance)
    questions = (
        Question(f"{form.name}/{who}", form.question.format(who), (answer,), (number,), form.name)
        for (form, who, answer), number in zip(alike, numbers, strict=True)
    )
    return QuestionSet("lookalikes", SOURCE, pool, tuple(questions))
