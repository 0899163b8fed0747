"""What `sparkbench train drafter` needs, on tiny shapes: conversations, a target with a tokenizer, and recipes."""

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import tiny_model

from sparkbench.train import recipe_file, tokenizer

NAMES = ("Ada", "Ben", "Cleo", "Dan")
SCHEDULE = {
    "eval_share": 0.15,
    "max_length": 160,
    "steps": 20,
    "global_batch": 3,
    "lr": 1e-2,
    "precision": '"float32"',
    "save_every": 100,
}


def silent(line: str) -> None:
    """Progress that nobody reads."""


def talk(number: int) -> list[dict[str, str]]:
    """A conversation of two turns whose answers follow from few facts."""
    draw = random.Random(number)
    name, low = draw.choice(NAMES), draw.randrange(5)
    first = " ".join(str(low + step) for step in range(20))
    return [
        {"from": "human", "value": f"Count from {low} for {name}."},
        {"from": "gpt", "value": f"Of course, {name}: {first}. That is all."},
        {"from": "human", "value": "Thanks!"},
        {"from": "gpt", "value": f"You are welcome, {name}. Ask me again whenever you want to count."},
    ]


def save_target(folder: Path, layers: int) -> tuple[Any, Any]:
    """A random Qwen3 in folder/target with a tokenizer learnt from folder/talks.jsonl; the model and the tokenizer."""
    rows = [talk(number) for number in range(24)]
    words = tokenizer.learn((turn["value"] for row in rows for turn in row), 300, 512)
    (folder / "talks.jsonl").write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    model = tiny_model(vocab=len(words), layers=layers)
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    return model, words


def save_recipe(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    """The bundled recipe `name` with other values, for folder/target and folder/talks.jsonl, as folder/recipe.toml."""
    text = (recipe_file.BUNDLED / f"{name}.toml").read_text()
    own = {"target": json.dumps(str(folder / "target")), "source": json.dumps(str(folder / "talks.jsonl"))}
    for key, value in (own | SCHEDULE | dict(values)).items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    path = folder / "recipe.toml"
    path.write_text(text)
    return path
