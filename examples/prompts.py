"""Eight prompts of different lengths, the longest ones over 512 tokens.

The long ones ask about passages of this project's licence, which every checkout
has; their lengths are meant to end inside a block as well as at its edge.
"""

from __future__ import annotations

from pathlib import Path

_LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"


def prompts() -> list[str]:
    """The prompts, shortest first."""
    licence = " ".join(_LICENSE.read_text().split())
    return [
        "The capital of France is",
        "Question: Which planet of our solar system is the largest, and how many "
        "Earths would fit inside it?\nAnswer:",
        "Water boils at 100 degrees Celsius at sea level. High in the mountains the "
        "air pressure is lower, and so water boils at a lower temperature. Cooking "
        "pasta in the mountains therefore takes",
        "Anna has three boxes. The red box holds twelve apples, the green box holds "
        "seven pears, and the blue box is empty. She moves five apples from the red "
        "box to the blue box, gives two pears to her brother, and then puts all the "
        "pears that are left into the blue box as well. Her brother asks what is in "
        "the blue box now. Anna looks inside and answers:",
        f"{_passage(licence, 900)}\n\nIn one sentence, this passage says that",
        f"{_passage(licence, 1700, start=1200)}\n\nThe most important word above is",
        f"{_passage(licence, 2900, start=2000)}\n\nA short summary of the text:",
        f"{_passage(licence, 4300, start=4000)}\n\nIn plain words, the reader must",
    ]


def _passage(text: str, length: int, start: int = 0) -> str:
    """About ``length`` characters of whole words from ``start`` on."""
    begin = text.rindex(" ", 0, start) + 1 if start else 0
    return text[begin : text.rindex(" ", begin, begin + length)]
