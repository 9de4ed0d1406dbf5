"""Which answers have words that no source has: questions that notes answer, and questions that they do not.

    python benchmarks/own_words.py [--model FOLDER|FILE.gguf]

Each answer is printed with what ``Answer.unsupported`` names of it. A made-up name or number should be named; an answer
that is right should have nothing named but words of its own.
"""

from __future__ import annotations

import argparse

import memstore
from memstore.tools.models import load_model

NOTES = """The database server is called badger and stands in the cellar of the house in Lindenstrasse.

Our cat is called Minka; she is eleven years old and eats only dry food since March.

The key to the bicycle shed hangs behind the calendar in the kitchen.

Dr. Okafor sees patients on Tuesdays and Thursdays between nine and noon.

The Wi-Fi password of the summer cottage is otter-lamp-47.

Grandmother's recipe for plum cake needs 1.5 kg of plums and 300 g of flour.

The insurance contract with Helvetia ends on 30 June 2027 and costs 214 francs a year.

The train to Basel leaves at 7:42 from platform 9.
"""
ASKED = {
    "answered by the notes": (
        "What is the database server called?",
        "How old is the cat?",
        "Where does the key to the bicycle shed hang?",
        "When does Dr. Okafor see patients?",
        "What is the Wi-Fi password of the summer cottage?",
        "How much flour does the plum cake need?",
        "When does the insurance contract with Helvetia end?",
        "From which platform does the train to Basel leave?",
    ),
    "not answered by them": (
        "What is the mail server called?",
        "What is the name of our dog?",
        "What is the phone number of Dr. Okafor?",
        "When was grandmother born?",
        "Which colour is the bicycle?",
        "How much does the train ticket to Basel cost?",
        "Who built the summer cottage?",
        "What is the capital of the canton?",
    ),
}


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or a GGUF file")
    model, tokenizer = load_model(parser.parse_args().model)
    with memstore.attach(model, "ram:", tokenizer=tokenizer) as reader:
        reader.read(NOTES, document="notes")
        for kind, questions in ASKED.items():
            named = 0
            for question in questions:
                answer = reader.ask(question, max_tokens=40)
                own = answer.unsupported()
                named += bool(own)
                print(f"{question}\n    {' '.join(answer.text.split())}\n    in no source: {', '.join(own) or '-'}")
            print(f"{kind}: {named} of {len(questions)} answers have words that no source has\n")


if __name__ == "__main__":
    main()
