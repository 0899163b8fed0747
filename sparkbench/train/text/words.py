"""Word lists shared by the domains, and the numbers and names kept apart for the bundled prompts.

`HELD_NUMBERS` never occur in lists or limits of training programs, so that a bundled prompt using them is
new. Names in the bundled prompts are likewise none of `PEOPLE`.
"""

from __future__ import annotations

PEOPLE = (
    ("Anna", "she", "her"), ("Ben", "he", "his"), ("Clara", "she", "her"), ("David", "he", "his"),
    ("Emma", "she", "her"), ("Felix", "he", "his"), ("Grace", "she", "her"), ("Henry", "he", "his"),
    ("Julia", "she", "her"), ("Leo", "he", "his"), ("Maria", "she", "her"), ("Noah", "he", "his"),
    ("Rosa", "she", "her"), ("Sam", "he", "his"), ("Tom", "he", "his"), ("Zoe", "she", "her"),
)  # fmt: skip
THINGS = ("apples", "books", "pencils", "cards", "coins", "stamps", "shells", "cookies", "marbles", "flowers",
          "stickers", "balloons", "oranges", "eggs", "candles", "buttons")  # fmt: skip
GOODS = ("melon", "book", "pencil", "cake", "lamp", "hat", "ticket", "ball", "cup", "plant", "toy", "pen")
PLACES = ("shop", "market", "school", "library", "farm", "bakery", "museum", "park")
WORDS = (
    "apple", "river", "stone", "cloud", "tree", "house", "garden", "light", "bird", "moon", "sun", "bread",
    "table", "green", "blue", "sea", "road", "snow", "cat", "dog", "fish", "lemon", "paper", "wind", "rain",
    "star", "leaf", "tea", "night", "radar", "level", "noon",
)  # fmt: skip
HELD_NUMBERS = (13, 17, 23, 29, 37, 41, 47, 53)
LIST_NUMBERS = tuple(n for n in range(1, 61) if n not in HELD_NUMBERS)

SURE = "<Sure|Of course|Sure thing|No problem|Certainly|With pleasure>"
HERE = "<here is|here you have|this is|below is|let me show you>"
NUMBER = {2: "two", 3: "three", 4: "four", 5: "five"}
CLOSING = "<|||I hope this helps.|I hope that helps you.|Good luck with it!|Have fun with it!|Let me know how it goes.>"
