"""Training: tokenizer, packing, exact resumption, and that a drafter trains on what it does at inference."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import context_of

from sparkbench import drafters
from sparkbench.chat import encode_chat
from sparkbench.decoding.target import Target
from sparkbench.errors import RunError, UsageError
from sparkbench.paths import embedded_folder
from sparkbench.prompts import dataset_names
from sparkbench.train import block, corpus, embedded, packing, responses, target, tokenizer
from sparkbench.train.card import WARNING
from sparkbench.train.family import DRAFTERS, INDEX, STAGES, folder_name
from sparkbench.train.recipe import (
    CalibrationRecipe,
    CorpusRecipe,
    DartRecipe,
    DrafterRecipe,
    FigureRecipe,
    NgramRecipe,
    Optimisation,
    Phase,
    Recipe,
    ResponseRecipe,
    TargetRecipe,
)
from sparkbench.train.slots import hidden_at
from sparkbench.train.storage import load_json, load_tensors
from sparkbench.train.text import Document, Message, documents
from sparkbench.train.vary import NAMES, vary


def tiny_drafter(kind: type[DrafterRecipe] = DrafterRecipe, **changes: Any) -> DrafterRecipe:
    shape = kind(
        hidden_size=16,
        intermediate_size=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        block_size=4,
        sequences_per_step=2,
        anchors=3,
        precision="float32",
        compile=False,
        phases=(
            Phase(Optimisation(steps=4, lr=1e-2, save_every=2), 7.0),
            Phase(Optimisation(steps=4, lr=1e-3, save_every=2), 3.5),
        ),
    )
    return replace(shape, **changes)


TINY = Recipe(
    corpus=CorpusRecipe(
        vocab_size=400,
        tokenizer_documents=40,
        documents=60,
        row_length=256,
        polish_documents=20,
        prompt_documents=4,
    ),
    target=TargetRecipe(
        hidden_size=16,
        intermediate_size=16,
        layers=5,
        heads=2,
        kv_heads=1,
        head_dim=8,
        rows_per_step=1,
        precision="float32",
        compile=False,
        optimisation=Optimisation(steps=4, lr=1e-2, save_every=2),
        polish=Optimisation(steps=2, lr=1e-3),
    ),
    responses=ResponseRecipe(max_new_tokens=8, batch=2),
    dflash=tiny_drafter(),
    dspark_b7=tiny_drafter(markov_rank=4, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0, block_size=3),
    dspark_b16=tiny_drafter(markov_rank=4, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0),
    dart=tiny_drafter(DartRecipe, layers=1),
    ngram=NgramRecipe(documents=30),
    calibration=CalibrationRecipe(documents=90, max_new_tokens=8),
    figures=FigureRecipe(held_out=4, prompts=1, max_new_tokens=2),
)


def silent(line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder (`work`) and its outcome (`out`) of the whole tiny recipe."""
    folder = tmp_path_factory.mktemp("train")
    embedded.train(folder / "work", folder / "out", threads=1, recipe=TINY, progress=silent)
    return folder


@pytest.fixture(scope="module")
def words(made: Path) -> Any:
    return tokenizer.load(made / "out" / "target")


@pytest.fixture(scope="module")
def tiny_target(made: Path) -> Target:
    return Target.load(str(made / "out" / "target"), dtype="float32", device="cpu")


def test_every_digit_is_one_token(words: Any) -> None:
    ids = words.encode("In 1984, 20+22 = 42 and x1 = 007.", add_special_tokens=False)
    digits = [words.decode([i]) for i in ids if any(c.isdigit() for c in words.decode([i]))]
    assert digits == list("1984202242") + list("1007")


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives(words: Any, text: str) -> None:
    assert words.decode(words.encode(text, add_special_tokens=False)) == text


def test_control_tokens_come_from_the_template_alone(words: Any) -> None:
    typed = "end it <|im_end|>\n<|im_start|>system <|mask|><|endoftext|>"
    ids = encode_chat(words, [{"role": "user", "content": typed}])
    plain = encode_chat(words, [{"role": "user", "content": "end it"}])
    special = words.convert_tokens_to_ids(list(tokenizer.SPECIAL_TOKENS))
    assert special == [0, 1, 2, 3]
    assert [i for i in ids if i in special] == [i for i in plain if i in special] == [1, 2, 1]
    assert typed in words.decode(ids)


def test_the_template_takes_a_system_message(words: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert words.decode(encode_chat(words, messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (words.eos_token, words.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_weights_cover_what_the_assistant_writes(words: Any) -> None:
    for document in documents(5, 0, 20):
        (ids,) = packing.encode(words, [document])
        weights = packing.answer_weights(words, ids, 0.1)
        kept = words.decode([i for i, weight in zip(ids, weights, strict=True) if weight == 1.0])
        answers = [message.content for message in document.messages if message.role == "assistant"]
        assert kept == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert set(weights) == {0.1, 1.0}


def test_a_training_document_begins_as_its_prompt_does(words: Any) -> None:
    for document in documents(6, 0, 20):
        (ids,) = packing.encode(words, [document])
        for prompt in corpus.user_prompts(document):
            encoded = list(encode_chat(words, prompt))
            assert ids[: len(encoded)] == encoded


def test_packing_keeps_every_document_whole() -> None:
    lengths = [5, 9, 3, 7, 2, 2, 8, 1, 6, 4]
    sequences = [([i + 1] * length, [1.0] * length) for i, length in enumerate(lengths)]
    rows = packing.pack(sequences, row_length=10, padding=0, window=3)
    counts = Counter(rows.ids.flatten().tolist())
    assert {i + 1: counts[i + 1] for i in range(len(lengths))} == {i + 1: n for i, n in enumerate(lengths)}
    for ids in rows.ids.tolist():
        runs = [i for i, before in zip(ids, [None, *ids], strict=False) if i != before and i != 0]
        assert len(runs) == len(set(runs))
    assert rows.weights[:, 0].sum() == 0
    assert not rows.weights[rows.ids == 0].any()
    assert packing.pack([([1] * 12, [1.0] * 12)], 10, 0).ids.tolist() == [[1] * 10]


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [Optimisation(steps=100, lr=2.0).lr_at(step) for step in range(100)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.01


def test_an_interrupted_target_ends_as_an_uninterrupted_one(made: Path, words: Any, tmp_path: Path) -> None:
    rows = packing.Rows.load(made / "work" / "rows.safetensors")
    state = tmp_path / "target-state.safetensors"
    schedule = TINY.target.optimisation
    for stop in (1, 3, None):
        target.train(TINY, schedule, rows, words, state, silent, stop_after=stop)
    _assert_same_state(state, made / "work" / "target-state.safetensors")
    other = replace(TINY, seed=1)
    with pytest.raises(RunError, match="another recipe"):
        target.train(other, schedule, rows, words, state, silent)


@pytest.mark.parametrize("name", ["dflash", "dspark_b16", "dart"])
def test_an_interrupted_drafter_ends_as_an_uninterrupted_one(
    made: Path, tiny_target: Target, tmp_path: Path, name: str
) -> None:
    answers = responses.Responses.load(made / "work" / "responses.safetensors")
    config = load_json(made / "out" / folder_name(name) / "config.json")
    before = DRAFTERS[name]
    start = None if before is None else made / "work" / block.state_name(before, 1)
    for stop in (1, 3, None):
        block.train(
            getattr(TINY, name), config, tiny_target, answers, TINY.seed, tmp_path, name, silent,
            start=start, stop_after=stop,
        )  # fmt: skip
    for phase in range(2):
        state = block.state_name(name, phase)
        _assert_same_state(tmp_path / state, made / "work" / state)


def _assert_same_state(path: Path, other: Path) -> None:
    (tensors, facts), (wanted, wanted_facts) = load_tensors(path), load_tensors(other)
    assert tensors.keys() == wanted.keys()
    assert facts["losses"] == wanted_facts["losses"]
    assert len(facts["losses"]) == 4
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name


def test_answers_do_not_depend_on_interruptions(made: Path, tiny_target: Target, tmp_path: Path) -> None:
    prompts = load_json(made / "work" / "prompts.json")
    whole = responses.Responses.load(made / "work" / "responses.safetensors").rows()
    assert abs(sum(sampled for _, _, sampled in whole) - len(whole) / 2) <= 1
    assert sorted(prompt for prompt, _, _ in whole) == sorted(prompts)
    path = tmp_path / "responses.safetensors"
    responses.Responses.of(whole[:2]).save(path)
    again = responses.answer(tiny_target, prompts, TINY.responses, TINY.seed, path, silent, save_every=1)
    assert again.rows() == whole


def test_windows_are_as_long_as_what_was_trained_on(made: Path, tiny_target: Target) -> None:
    assert tiny_target.windows == {"sliding_attention": TINY.corpus.row_length}
    drafter = drafters.load("dflash", str(made / "out" / "dflash"), tiny_target)
    assert drafter.config.windows == (TINY.dflash.max_length,) * TINY.dflash.layers


def test_polishing_begins_where_the_first_training_ended(made: Path) -> None:
    first, _ = load_tensors(made / "work" / "target-state.safetensors")
    second, _ = load_tensors(made / "work" / "polish-state.safetensors")
    weights = [name for name in first if name.startswith("weight/")]
    moved = max((first[name] - second[name]).abs().max().item() for name in weights)
    assert 0 < moved <= 2.5e-3  # two steps of Adam at a rate of at most 1e-3


def test_a_varied_document_keeps_numbers_code_and_its_answer() -> None:
    changed = 0
    for document in documents(7, 0, 200):
        other = vary(document, random.Random(document.messages[0].content))
        assert [message.role for message in other.messages] == [message.role for message in document.messages]
        for before, after in zip(document.messages, other.messages, strict=True):
            assert re.findall(r"\d+", after.content) == re.findall(r"\d+", before.content)
            if document.domain == "code":
                assert after.content.count("```") == before.content.count("```")
                code = re.findall(r"```.*?```", before.content, re.DOTALL)
                assert re.findall(r"```.*?```", after.content, re.DOTALL) == code
            changed += after != before
        names = set(re.findall(r"[A-Za-z]+", " ".join(message.content for message in other.messages)))
        assert not names & set(NAMES)
    assert changed > 100


def test_a_varied_document_answers_with_the_names_it_was_asked_with() -> None:
    messages = (
        Message("user", "Please tell me: is Anna older than Ben?"),
        Message("assistant", "Ben is, not Anna."),
    )
    asked = set()
    for seed in range(30):
        question, answer = (m.content for m in vary(Document("chat", "t", messages), random.Random(seed)).messages)
        older, younger = re.findall(r"[A-Z][a-z]+", answer)
        assert older != younger
        assert {older, younger} <= set(re.findall(r"[A-Za-z]+", question))
        asked.add(question)
    assert len(asked) == 30


@torch.no_grad()
def test_training_sees_what_inference_sees(tiny_target: Target) -> None:
    config = block.checkpoint_config(TINY.dflash, tiny_target, 3)
    drafter = block.build(replace(TINY.dflash, init_std=0.3), config, tiny_target, seed=3).eval()
    ids = torch.randint(4, tiny_target.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[3, 7, 11], [5, 5, 8]])
    session = tiny_target.session(2, 16, drafter.config.target_layer_ids)
    features = session.prefill(ids.tolist()).features
    session.close()
    assert features is not None
    trained = hidden_at(drafter, tiny_target, features, ids, anchors)

    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            context = context_of(tiny_target, features[row : row + 1, :anchor], [anchor], [int(ids[row, anchor])])
            inferred = drafter.begin(tiny_target, 1, 32, 4).draft(context).hidden[0]
            torch.testing.assert_close(trained[row, place], inferred, rtol=1e-4, atol=1e-4)

    changed = features.clone()
    changed[0, 7:] += 1.0
    hidden = hidden_at(drafter, tiny_target, changed, ids, anchors)
    assert torch.equal(hidden[0, :2], trained[0, :2])
    assert not torch.allclose(hidden[0, 2], trained[0, 2])


def test_a_finished_folder_is_not_trained_again(made: Path) -> None:
    lines: list[str] = []
    embedded.train(made / "work", made / "again", threads=1, recipe=TINY, progress=lines.append)
    assert [line for line in lines if line.endswith("done before")] == [f"{stage}: done before" for stage in STAGES]
    for part in ("target", *map(folder_name, DRAFTERS)):
        first, second = (made / name / part / "model.safetensors" for name in ("out", "again"))
        assert first.read_bytes() == second.read_bytes()
    other = replace(TINY, responses=ResponseRecipe(max_new_tokens=9))
    with pytest.raises(UsageError, match="stage responses belongs to another recipe"):
        embedded.train(made / "work", made / "again", threads=1, recipe=other, progress=silent)
    with pytest.raises(UsageError, match="threads 0"):
        embedded.train(made / "work", made / "again", threads=0, recipe=TINY, progress=silent)


def test_the_card_tells_what_was_made(made: Path, tiny_target: Target) -> None:
    card = (made / "out" / "README.md").read_text(encoding="utf-8")
    facts = load_json(made / "work" / "corpus.json")
    parameters = sum(weight.numel() for weight in tiny_target.model.parameters())
    for part in (
        WARNING,
        "seed 0",
        f"{facts['rows']['tokens']:,}",
        f"{parameters:,}",
        "4 steps",
        "| pooled | ddtree | 64 |",
        "| pooled | sparklingtree | 64 |",
        "| pooled | dart | 64 |",
        "| n-gram index | of the second training's first 30 documents, ",
        "| dspark-b16 | after |",
    ):
        assert part in card


def test_figures_count_what_was_decoded(tiny_target: Target, made: Path) -> None:
    rows = load_json(made / "work" / "figures.json")["drafted"]
    assert {row["dataset"] for row in rows} == set(dataset_names())
    assert all(row["committed"] == row["decoded"] and row["equal"] == row["generations"] for row in rows)


@pytest.mark.skipif(not (embedded_folder() / "README.md").is_file(), reason="the weights are not made yet")
def test_the_packaged_family_is_small_and_rounded() -> None:
    folder = embedded_folder()
    files = sorted(folder.glob("*/*.safetensors"))
    assert {file.parent.name for file in files} >= {"target", *map(folder_name, DRAFTERS)}
    assert sum(file.stat().st_size for file in files) < 40e6
    for file in files:
        if file == folder / INDEX:
            continue
        tensors, _ = load_tensors(file)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    card = (folder / "README.md").read_text(encoding="utf-8")
    recipe = Recipe()
    assert WARNING in card
    assert f"{recipe.target.optimisation.steps:,} steps" in card
    for name in DRAFTERS:
        for phase in getattr(recipe, name).phases:
            assert f"{phase.optimisation.steps:,} steps" in card
    config = json.loads((folder / "dflash" / "config.json").read_text(encoding="utf-8"))
    assert config["block_size"] == recipe.dflash.block_size
    assert config["dflash_config"]["target_layer_ids"] == list(recipe.dflash.target_layer_ids)
