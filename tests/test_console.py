"""Console output: any text is shown literally, colour follows the environment, JSON is the same bytes
everywhere.
"""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkbench.cli import console

TEXTS = [
    "[INST] hi [/INST]",
    "a[0] = b[i]",
    "path [/usr/bin]",
    "[bold]x",
    ":smile: 12 'quoted'",
    "\N{GRINNING FACE}",
    "back\\slash",
]
SHOWN = {
    "\t\n\r": "\\t\\n\\r",
    "\x1b[31mred": "\\x1b[31mred",
    "\x00\x7f\x85\x9b": "\\x00\\x7f\\x85\\x9b",
    "a\u202eb\u2066c\u2028d": "a\\u202eb\\u2066c\\u2028d",
    "\ud83d": "\\ud83d",
    "\U000e0041": "\\U000e0041",
}

PRINTS = """
import sys
from sparkbench.cli import console
console.prepare_streams()
texts = {texts!r}
console.show(console.table(("text", "n"), [[text, "1"] for text in texts], right=("n",)))
for text in texts:
    console.show(console.literal(text), wrap=False)
    console.note(text)
console.print_json({{"texts": texts}})
"""


def printed(environment: dict[str, str], texts: list[str]) -> tuple[str, str]:
    """stdout and stderr, as ASCII with escapes, of a process that prints `texts` in every way there is."""
    keep = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PRINTS.format(texts=texts)],
        env={**keep, **environment},
        cwd=root,
        capture_output=True,
        check=True,
    )
    return (
        done.stdout.decode("cp1252", "backslashreplace"),
        done.stderr.decode("cp1252", "backslashreplace"),
    )


@pytest.mark.parametrize("text", TEXTS)
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert console.literal(text) == text


@pytest.mark.parametrize("text", SHOWN)
def test_what_acts_on_a_terminal_becomes_a_visible_escape(text: str) -> None:
    assert console.literal(text) == SHOWN[text]


def test_emoji_joined_by_zero_width_joiners_stay_whole() -> None:
    family = "\N{MAN}\u200d\N{WOMAN}"
    assert console.literal(family) == family


def test_text_is_literal_in_a_narrow_pipe_with_a_small_encoding() -> None:
    small = {"PYTHONIOENCODING": "cp1252", "COLUMNS": "40", "TERM": "dumb"}
    out, err = printed(small, [*TEXTS, *SHOWN, "y" * 5000])
    for text in [*TEXTS[:5], *SHOWN.values(), "y" * 5000, "\\U0001f600"]:
        assert text in out
        assert text in err
    assert "\x1b" not in out + err


def test_colour_is_asked_for_by_name_and_json_never_has_it() -> None:
    plain, _ = printed({}, TEXTS)
    coloured, _ = printed({"FORCE_COLOR": "1"}, TEXTS)
    refused, _ = printed({"FORCE_COLOR": "1", "NO_COLOR": "1"}, TEXTS)
    narrow, _ = printed({"COLUMNS": "40", "PYTHONIOENCODING": "cp1252"}, TEXTS)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    assert refused == plain
    documents = {output.splitlines()[-1] for output in (plain, coloured, narrow)}
    assert len(documents) == 1
    assert json.loads(documents.pop()) == {"texts": TEXTS}


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_when_colour_is_used(
    environment: dict[str, str], terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert console.wants_colour(stream) is expected


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Row:
        tau: float
        place: Path
        ids: tuple[int, ...]

    console.print_json([Row(float("nan"), Path("a/b"), (1, 2)), {"inf": float("-inf"), "text": "\u2028"}])
    written = capsys.readouterr().out
    assert written == '[{"tau": null, "place": "a/b", "ids": [1, 2]}, {"inf": null, "text": "\\u2028"}]\n'


def test_a_table_folds_long_cells_and_loses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    console.show(console.table(("name", "what"), [["a", "x" * 200], ["b", "short"]]))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("x") for line in lines) == 200
    assert all(len(line) <= 90 and line == line.rstrip() for line in lines)
    assert lines[0].startswith("NAME  WHAT")
