"""Facts in books, after BABILong (Kuratov et al. 2024): who went where with what, hidden in other text.

The three kinds of questions are bAbI's first (Weston et al. 2015): an answer needs one, two or three facts. People,
places and the story are our own, and the book is Python's language reference. Everybody goes to many places one after
the other, so the right fact is the last of several that look alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.questions.manual import hidden, paragraphs
from memstore.train.questions import Question, QuestionSet

SOURCE = "a story of memstore's own in Python's language reference (PSF licence)"
FACTS = ("one", "two", "three")
CHARACTERS = 70_000
PARAGRAPH = 300
EVENTS = 200
PEOPLE = (
    "Adele Boris Carla Dieter Elsa Farid Greta Henrik Irma Jakob Kirsten Lorenz Mathilda Norbert Oda Pierre Quentin "
    "Rahel Selma Theo Ulrike Viktor Wanda Yannick"
)
PLACES = ("kitchen", "garden", "office", "bedroom", "hallway", "bathroom", "cellar", "library")
THINGS = "apple football lantern letter milk umbrella violin ladder basket candle scarf hammer mirror kettle map coat"


@dataclass
class Story:
    """The events so far, and the facts that each question needs. Events are numbered."""

    told: list[str] = field(default_factory=list)
    moves: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """The places of each person in order, each with its event."""
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The holder of each thing, and the event since then."""

    @classmethod
    def of(cls, events: int, chance: random.Random) -> Story:
        """Make a random story of ``events`` events."""
        story, people, things = cls(), PEOPLE.split(), THINGS.split()
        while len(story.told) < events:
            who, thing = chance.choice(people), chance.choice(things)
            if who in story.moves and thing not in story.held and chance.random() < 0.25:
                story.held[thing] = (who, len(story.told))
                story.told.append(f"{who} picked up the {thing}.")
            else:
                here = story.moves.get(who, [("", 0)])[-1][0]
                place = chance.choice([each for each in PLACES if each != here])
                story.moves.setdefault(who, []).append((place, len(story.told)))
                story.told.append(f"{who} went to the {place}.")
        return story

    def asked(self, facts: str) -> Iterator[tuple[str, str, str, list[int]]]:
        """Yield name, question, answer and evidence of each question that needs the number of ``facts``."""
        if facts == "one":
            for who, moves in self.moves.items():
                yield who, f"Where is {who} now?", moves[-1][0], [moves[-1][1]]
            return
        for thing, (who, taken) in self.held.items():
            place, when = self.moves[who][-1]
            if facts == "two":
                yield thing, f"Where is the {thing} now?", place, sorted([taken, when])
            elif when > taken:  # it was carried at least once
                before, earlier = self.moves[who][-2]
                question = f"Where was the {thing} before it came to the {place}?"
                yield thing, question, before, sorted([taken, earlier, when])


def load(facts: str = "one", book: str | None = None) -> QuestionSet:
    """Load the story among the paragraphs of ``book`` (default: Python's language reference), and its questions.

    An answer needs the number of ``facts``. Raises ``NotFound`` if this Python has no reference.
    """
    text, chance = paragraphs(CHARACTERS, PARAGRAPH, book), random.Random(0)
    story = Story.of(min(EVENTS, len(text)), chance)
    pool, numbers = hidden(story.told, text, chance)
    questions = (
        Question(f"babi-{facts}/{name}", question, (answer,), tuple(numbers[event] for event in evidence))
        for name, question, answer, evidence in story.asked(facts)
    )
    return QuestionSet(f"babi-{facts}", SOURCE, pool, tuple(questions))
