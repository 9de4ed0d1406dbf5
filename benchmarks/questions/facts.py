"""Invented facts, hidden in a manual, each asked in three ways: how much of finding is matching words?

The manual is Python's language reference, which every Python carries. A fact is asked in its ``own`` words: the
beginning of its sentence, as for needles. It is also asked in a ``plain`` question with some of these words, and in
``other`` words. Such a question shares no content word with the fact. All three ways of a fact are in the same half.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.questions.manual import hidden, paragraphs
from memstore.errors import InvalidArgument
from memstore.train.questions import Question, QuestionSet

SOURCE = "facts of memstore's own in Python's language reference (PSF licence)"
WAYS = ("own", "plain", "other")
CHARACTERS = 70_000
"""Characters of the manual: about 16,000 tokens."""
PARAGRAPH = 600
"""Characters of a paragraph of the manual, at least."""


class Fact(NamedTuple):
    """A sentence, its questions, and its answer."""

    sentence: str
    plain: str
    other: str
    answer: str


FACTS = (
    Fact("The doctor told Marta to stay away from peanuts.", "What did the doctor tell Marta to stay away from?",
         "Which food does her physician forbid?", "peanuts"),
    Fact("The spare key of the boathouse lies under the third flowerpot.", "Where is the spare key of the boathouse?",
         "How can someone get into the shed by the lake when nobody is home?", "under the third flowerpot"),
    Fact("Our flight to Lisbon leaves at a quarter past six.", "When does our flight to Lisbon leave?",
         "At what time will the plane bound for Portugal take off?", "a quarter past six"),
    Fact("Uncle Bertram bought a red motorcycle last spring.", "What did Uncle Bertram buy last spring?",
         "Which vehicle has my mother's brother recently purchased?", "a red motorcycle"),
    Fact("The bakery on Elm Street closes on Mondays.", "When does the bakery on Elm Street close?",
         "On which weekday can one not get fresh bread there?", "Mondays"),
    Fact("Ingrid plays the cello in the town's orchestra.", "What does Ingrid play in the town's orchestra?",
         "Which instrument has the musician chosen?", "the cello"),
    Fact("The cat of our neighbours is called Hannibal.", "What is the cat of our neighbours called?",
         "Which name was given to the pet next door?", "Hannibal"),
    Fact("The rent of the flat rises to nine hundred euros in May.", "How high is the rent of the flat in May?",
         "What will living in the apartment cost each month?", "nine hundred euros"),
    Fact("Professor Okafor collects stamps from Mongolia.", "What does Professor Okafor collect?",
         "Which hobby has the scholar taken up?", "stamps from Mongolia"),
    Fact("The wedding of Tom and Alice will be held in a vineyard.", "Where will the wedding of Tom and Alice be held?",
         "At what kind of place does the couple marry?", "in a vineyard"),
    Fact("Grandmother hid the silver spoons in the piano.", "Where did Grandmother hide the silver spoons?",
         "What conceals the old woman's precious cutlery?", "in the piano"),
    Fact("The harbour froze in the winter of 1947.", "When did the harbour freeze?",
         "In which cold year could ships not leave because of ice?", "1947"),
    Fact("Leo broke his arm when he fell off a ladder.", "What did Leo break when he fell off a ladder?",
         "Which injury did the boy suffer?", "his arm"),
    Fact("The password of the guest network is tangerine.", "What is the password of the guest network?",
         "How do visitors get onto the wireless internet?", "tangerine"),
    Fact("Nadia wants to become a veterinarian.", "What does Nadia want to become?",
         "Which profession is the girl dreaming of?", "a veterinarian"),
    Fact("The museum shows paintings by Vermeer until October.", "Whose paintings does the museum show until October?",
         "Which Dutch artist's pictures are exhibited this autumn?", "Vermeer"),
    Fact("Mr. Haddad drinks his coffee with cardamom.", "What does Mr. Haddad drink his coffee with?",
         "Which spice goes into the gentleman's hot beverage?", "cardamom"),
    Fact("The old bridge was torn down after the flood.", "When was the old bridge torn down?",
         "What made people demolish the river crossing?", "the flood"),
    Fact("Sergeant Wells is afraid of spiders.", "What is Sergeant Wells afraid of?",
         "Which animals frighten the soldier?", "spiders"),
    Fact("The train to the coast takes four hours.", "How long does the train to the coast take?",
         "What is the duration of a railway journey down to the seaside?", "four hours"),
    Fact("Yusuf lent his tent to the scouts.", "To whom did Yusuf lend his tent?",
         "Who borrowed camping equipment from him?", "the scouts"),
    Fact("The choir rehearses in the basement of the library.", "Where does the choir rehearse?",
         "In which room do the singers practise?", "in the basement of the library"),
    Fact("Clara won the chess tournament in Oslo.", "What did Clara win in Oslo?",
         "Which competition in Norway had a female champion?", "the chess tournament"),
    Fact("The recipe for the soup needs two leeks.", "What does the recipe for the soup need?",
         "Which vegetables does the cook have to purchase for the broth?", "two leeks"),
    Fact("The mayor resigned because of a bribe.", "Why did the mayor resign?",
         "What scandal ended the politician's career?", "a bribe"),
    Fact("Pavel sold his farm to a brewery.", "To whom did Pavel sell his farm?",
         "Which company owns the peasant's land now?", "a brewery"),
    Fact("The lighthouse is painted in green and white.", "How is the lighthouse painted?",
         "Which colours does the tower that warns the sailors have?", "green and white"),
    Fact("Doctor Lindqvist operates on Thursdays only.", "When does Doctor Lindqvist operate?",
         "On what day of the week can a patient have surgery?", "Thursdays"),
    Fact("The twins were born during a thunderstorm.", "When were the twins born?",
         "What was the weather like as the two babies came into the world?", "a thunderstorm"),
    Fact("Hugo repairs clocks in his attic.", "What does Hugo repair in his attic?",
         "Which devices that tell the time does the craftsman mend?", "clocks"),
    Fact("The treasure map was drawn by a blind monk.", "By whom was the treasure map drawn?",
         "Which person without eyesight showed the way to the hidden gold?", "a blind monk"),
    Fact("Amira's dog barks at umbrellas.", "What does Amira's dog bark at?",
         "Which objects that keep off rain upset the puppy?", "umbrellas"),
)  # fmt: skip


def load(way: str = "other", manual: str | None = None) -> QuestionSet:
    """Load the facts among the paragraphs of ``manual`` (default: Python's language reference), asked in one ``way``.

    Raises ``InvalidArgument`` for an unknown way, and ``NotFound`` if this Python has no reference.
    """
    if way not in WAYS:
        raise InvalidArgument(f"way must be one of {', '.join(WAYS[:-1])} or {WAYS[-1]}, not {way!r}")
    text = paragraphs(CHARACTERS, PARAGRAPH, manual)
    pool, numbers = hidden([fact.sentence for fact in FACTS], text, random.Random(0))
    questions = []
    for (each, fact), number in zip(enumerate(FACTS), numbers, strict=True):
        asked = {"own": fact.sentence.partition(fact.answer)[0].strip(), "plain": fact.plain, "other": fact.other}
        about = f"fact-{each}"
        questions.append(Question(f"{about}/{way}", asked[way], (fact.answer,), (number,), about))
    return QuestionSet(f"facts-{way}", SOURCE, pool, tuple(questions))
