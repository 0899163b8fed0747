"""The synthetic training text: repeatable, correct where that can be checked, apart from the prompts."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sparkbench.paths import embedded_folder
from sparkbench.train.recipe import Recipe
from sparkbench.train.text import Document, document, documents
from sparkbench.train.vary import varied

SEED = 0
DATASETS = Path(__file__).parent.parent / "datasets"
# An equation of plain numbers; what follows a variable or another operator is only a part of one.
EQUATION = re.compile(r"(?<![\w.])(?<![-+*/] )(\d+(?: (?:[-+*/]|\\cdot) \d+)+) = (\d+)(?![\d\w])")
# A conservative stand-in for the tokenizer: words and runs of punctuation are single tokens, and a run of 8
# of them is forbidden where the rule says 12 byte-pair tokens.
TOKEN = re.compile(r"[A-Za-z]+|\d|[^\w\s]+|_")
RUN = 8
OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Div: int.__floordiv__}


@pytest.fixture(scope="module")
def sample() -> list[Document]:
    return list(documents(SEED, 0, 4000))


def runs(text: str) -> Iterator[tuple[str, ...]]:
    tokens = TOKEN.findall(text)
    return zip(*(tokens[i:] for i in range(RUN)), strict=False)


def held_out() -> set[tuple[str, ...]]:
    rows = [json.loads(line) for path in DATASETS.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    return {run for row in rows for turn in row["turns"] for run in runs(turn)}


def collisions(texts: Iterable[Document]) -> list[tuple[str, str]]:
    held = held_out()
    return [
        (doc.template, " ".join(run))
        for doc in texts
        for message in doc.messages
        for run in runs(message.content)
        if run in held
    ]


def value(expression: str) -> int:
    """The value of an expression of whole numbers; a division with a remainder fails."""

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        assert not isinstance(node.op, ast.Div) or left % right == 0, expression
        return OPERATORS[type(node.op)](left, right)

    return walk(ast.parse(expression, mode="eval").body)


def test_a_document_depends_on_seed_and_index_alone() -> None:
    forward = [document(3, i) for i in range(40)]
    backward = [document(3, i) for i in reversed(range(40))]
    assert forward == backward[::-1] == list(documents(3, 0, 40))
    assert list(documents(3, 25, 5)) == forward[25:30]
    assert document(4, 0) != document(3, 0)


def test_the_text_is_the_one_the_shipped_weights_were_made_from(sample: list[Document]) -> None:
    digest = hashlib.sha256(repr(sample[:200]).encode()).hexdigest()
    assert digest == "f29e56ba5c7e45fecbf76bb1f15a2d4224a313a08625025cfa8218da8f68ce4e"


def test_roles_alternate_and_domains_have_their_shares(sample: list[Document]) -> None:
    for doc in sample:
        roles = [message.role for message in doc.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message.content.strip() == message.content != "" for message in doc.messages)
    for domain, share in (("code", 0.35), ("math", 0.35), ("chat", 0.30)):
        assert sum(doc.domain == domain for doc in sample) / len(sample) == pytest.approx(share, abs=0.03)
    assert sum(len(doc.messages) > 2 for doc in sample) > len(sample) / 5


def test_no_template_mark_is_left(sample: list[Document]) -> None:
    for doc in sample:
        for message in doc.messages:
            prose = re.sub(r"```.*?```|`[^`]*`", "code", message.content, flags=re.DOTALL)
            assert not re.search(r"[@<>|]|  |\.\.|,,| [.,?!]", prose), prose


def test_every_equation_holds_and_the_box_carries_the_last_result(sample: list[Document]) -> None:
    checked = 0
    for doc in (doc for doc in sample if doc.domain == "math"):
        for message in doc.messages[1::2]:
            equations = EQUATION.findall(message.content)
            for left, right in equations:
                assert value(left.replace("\\cdot", "*")) == int(right), message.content
            checked += len(equations)
            boxed = re.findall(r"\\boxed\{(\d+)\}", message.content)
            assert len(boxed) == 1, message.content
        if equations := EQUATION.findall(doc.messages[1].content):
            assert equations[-1][1] == re.findall(r"\\boxed\{(\d+)\}", doc.messages[1].content)[0]
    assert checked > 2000


def test_linear_equations_are_solved_by_their_answers(sample: list[Document]) -> None:
    checked = 0
    for doc in sample:
        found = re.search(r"\$(\d+)[xyzn] ([+-]) (\d+) = (\d+)\$", doc.messages[0].content)
        box = re.search(r"\\boxed\{(\d+)\}", doc.messages[1].content)
        if found and box:
            a, b, c = int(found[1]), int(found[2] + found[3]), int(found[4])
            assert a * int(box[1]) + b == c
            checked += 1
    assert checked > 50


def test_code_compiles_and_gives_the_values_it_claims(sample: list[Document]) -> None:
    calls = 0
    for doc in (doc for doc in sample if doc.domain == "code"):
        names: dict[str, Any] = {}
        for message in doc.messages[1::2]:
            for source in re.findall(r"```python\n(.*?)```", message.content, re.DOTALL):
                exec(source, names)
                function = [v for v in names.values() if callable(v)][-1]
                assert function.__doc__
            claimed = re.findall(r"`(\w+\(.*?\))` (?:returns|gives back|gives|is) `(.*?)`", message.content)
            for call, result in claimed + re.findall(r">>> (.*)\n    (.*)", doc.messages[0].content):
                assert repr(eval(call, names)) == result, doc
                calls += 1
    assert calls > 1000


def test_documents_differ(sample: list[Document]) -> None:
    assert len({doc.messages for doc in sample}) > 0.998 * len(sample)
    answers = [message.content for doc in sample for message in doc.messages[1::2]]
    assert len(set(answers)) > 0.9 * len(answers)


def test_the_wording_of_an_answer_stays_open(sample: list[Document]) -> None:
    """After the same five words, answers often go on in different ways: about one word in six is a choice."""
    followers: dict[tuple[str, ...], dict[str, int]] = {}
    contexts = []
    for doc in sample:
        for message in doc.messages[1::2]:
            words = message.content.split()
            for i in range(3, len(words)):
                context = (doc.template, *words[i - 3 : i])
                ahead = followers.setdefault(context, {})
                ahead[words[i]] = ahead.get(words[i], 0) + 1
                contexts.append(context)
    open_points = sum(
        max(followers[context].values()) < 0.75 * sum(followers[context].values()) for context in contexts
    )
    assert 0.12 < open_points / len(contexts) < 0.5


def test_prompts_share_no_run_with_the_training_text(sample: list[Document]) -> None:
    assert len(held_out()) > 2000
    assert collisions(sample) == []


def trained_on() -> Iterator[Document]:
    """Every document of the recipe: both trainings of the target, and the prompts that drafters learn from."""
    corpus = Recipe().corpus
    yield from documents(Recipe().seed, 0, corpus.documents)
    yield from varied(Recipe().seed, 0, corpus.polish_documents, corpus.varied)
    yield from varied(Recipe().seed, corpus.documents, corpus.prompt_documents, corpus.varied)


@pytest.mark.slow
def test_prompts_share_no_run_with_the_whole_training_range() -> None:
    assert collisions(trained_on()) == []


@pytest.mark.slow
def test_prompts_share_no_run_of_tokens_with_the_whole_training_range() -> None:
    """The rule in the embedded tokenizer's own tokens: no run of 12 of a message's tokens."""
    tokenizer = Tokenizer.from_file(str(embedded_folder() / "target" / "tokenizer.json"))

    def token_runs(texts: list[str]) -> Iterator[tuple[int, ...]]:
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield from zip(*(encoding.ids[i:] for i in range(12)), strict=False)

    rows = [json.loads(line) for path in DATASETS.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    held = set(token_runs([turn for row in rows for turn in row["turns"]]))
    assert len(held) > 2000
    texts = trained_on()
    while chunk := [message.content for doc in islice(texts, 10_000) for message in doc.messages]:
        assert held.isdisjoint(token_runs(chunk))


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "gsm8k", "math500", "alpaca", "mt-bench"])
def test_bundled_prompts_have_the_form_of_their_set(name: str) -> None:
    rows = [json.loads(line) for line in (DATASETS / f"{name}.jsonl").read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == [f"{name}-{i:03d}" for i in range(1, 25)]
    assert all(len(row["turns"]) == (2 if name == "mt-bench" else 1) for row in rows)
    first = [row["turns"][0] for row in rows]
    assert len(set(first)) == len(first)
    if name in ("gsm8k", "math500"):
        suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
        assert all(text.endswith(suffix) for text in first)
    if name == "humaneval":
        start = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        for text in first:
            assert text.startswith(start)
            assert text.endswith('    """\n\n```')
            compile(text.removeprefix(start).removesuffix("\n```"), name, "exec")
    if name == "mbpp":
        assert all(re.match(r"Write a (python )?function to ", text) for text in first)
