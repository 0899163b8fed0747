"""Running a sweep with stand-ins for the models: rows, order, resuming, failures, chats and contexts."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkbench.decoding.loop import DecodeConfig, Generation, Request
from sparkbench.decoding.rounds import Round
from sparkbench.errors import UsageError
from sparkbench.exactness import Verdict
from sparkbench.models import Tools
from sparkbench.results import KEY, read_rounds, read_run, read_samples
from sparkbench.rows import is_degenerate
from sparkbench.runner import run
from sparkbench.sweep import Arm, SweepConfig

CAP = 8
PROMPTS = ["a\u0085b\u2028c", "two\nlines", "smile \U0001f600", "[bold]x", "four", "five"]


@dataclass
class Models:
    """A target that counts upwards from the prompt's last token, and methods that commit all they draft.

    calls: (arm, number of requests, first request, timed, profiled) of every generation, in order.
    fail:  raises what it returns for a call.
    streams: (arm, arrivals, slots) of every stream.
    """

    max_context: int = 64
    calls: list[tuple[str, int, Request, bool, bool]] = field(default_factory=list)
    fail: Any = None
    wrong: str = ""
    device: str = "cpu"
    streams: list[tuple[str, list[float], int]] = field(default_factory=list)

    @property
    def tools(self) -> Tools:
        config = SimpleNamespace(_attn_implementation="sdpa")
        target = SimpleNamespace(
            model=SimpleNamespace(parameters=lambda: iter([torch.zeros(3)]), config=config),
            tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids))),
            name="stub",
            revision=None,
            device=torch.device(self.device),
            dtype=torch.float32,
            max_context=self.max_context,
            stop_ids=frozenset({5}),
        )
        return Tools(
            load_target=lambda config: target,
            load_drafter=lambda kind, source, target: SimpleNamespace(revision="r1", source=source, markov_head=None),
            build=self.build,
            equip=lambda methods, target, batch_sizes: None,
            generate=self.generate,
            serve=self.serve,
            classify=lambda target, request, reference, other, sampling, noise, rows: Verdict(
                "identical" if reference.output_ids == other.output_ids else "violation"
            ),
            width_noise=lambda target, request, ids, widths, rows: dict.fromkeys(widths, 0.0),
            encode=lambda tokenizer, messages, thinking: tuple(ord(c) for m in messages for c in m["content"]),
        )

    def build(self, arm: Arm, drafter: object) -> Any:
        return SimpleNamespace(label=arm.label, max_nodes=arm.budget or 3)

    def generate(self, target: Any, method: Any, requests: Sequence[Request], config: DecodeConfig) -> list[Generation]:
        timed = config.stop_ids is None
        self.calls.append((method.label, len(requests), requests[0], timed, config.profile))
        failure = self.fail and self.fail(len(self.calls), method.label, timed)
        if failure:
            raise failure
        return [self.answer(method.label, request, config) for request in requests]

    def serve(
        self, target: Any, method: Any, requests: Sequence[Request], config: DecodeConfig, slots: int
    ) -> list[Generation]:
        self.streams.append((method.label, [request.arrival_s for request in requests], slots))
        made = self.generate(target, method, requests, config)
        return [
            replace(each, arrival_s=request.arrival_s, batch_rounds=9)
            for each, request in zip(made, requests, strict=True)
        ]

    def answer(self, label: str, request: Request, config: DecodeConfig) -> Generation:
        start = request.prompt_ids[-1] + (label == self.wrong)
        output = tuple(start + step for step in range(1, config.max_new_tokens + 1))
        step = 1 if label == "autoregressive" else 4
        rounds: list[Round] = []
        left = len(output) - 1
        while left:
            committed = min(step, left)
            stages = {"draft": 5, "commit/compact": 2} if step > 1 else {"verify": 7}
            rounds.append(Round(not rounds, step - 1, step - 1, False, step - 1, committed, None, step - 1, stages))
            left -= committed
        return Generation(output, "length", tuple(rounds), 0.5, 1.0 / step, 0.1, 2.0 / step, len(rounds) + 1)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    lines = [json.dumps({"id": f"p{i}", "prompt": text}) for i, text in enumerate(PROMPTS)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {
        "target": str(tmp_path / "target"),
        "drafters": {"dflash": str(tmp_path / "drafter")},
        "data": str(tmp_path / "mine.jsonl"),
        "methods": ("dflash", "ddtree"),
        "budgets": (16, 32),
        "max_new_tokens": CAP,
    }


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_samples([out]).table.to_pylist()
    return found


def data(settings: dict[str, Any], *prompts: dict[str, Any]) -> None:
    Path(settings["data"]).write_text("\n".join(map(json.dumps, prompts)))


def test_every_prompt_and_arm_has_a_row_that_adds_up(settings: dict[str, Any], tmp_path: Path) -> None:
    models = Models()
    outcome = run(SweepConfig(**settings, seed=9007199254740993), tmp_path / "out", tools=models.tools)
    assert (outcome.exit_code, outcome.units, outcome.measured, outcome.rows) == (0, 1, 1, 24)
    found = rows(tmp_path / "out")
    assert len({tuple(row[name] for name in KEY) for row in found}) == 24
    arms = Counter((row["variant"], row["budget"]) for row in found)
    assert arms == {
        (name, b): 6 for name, b in [("autoregressive", None), ("dflash", None), ("ddtree", 16), ("ddtree", 32)]
    }
    for row in found:
        assert row["status"] == "ok"
        assert row["committed_sum"] + 1 == row["tokens_out"] == len(row["output_ids"]) == CAP
        assert row["accepted_sum"] <= row["proposed_sum"]
        assert row["seed"] == 9007199254740993
        assert row["exactness"] == (None if row["variant"] == "autoregressive" else "identical")
        assert row["peak_device_bytes"] is None
        assert row["peak_host_bytes"] > 1 << 20
        assert row["batch_size"] == 1
    rounds = read_rounds([tmp_path / "out"]).table.to_pylist()
    assert len(rounds) == sum(row["rounds"] for row in found)
    for each in rounds:
        is_ar = each["variant"] == "autoregressive"
        assert (each["draft_ns"], each["verify_ns"]) == ((None, 7) if is_ar else (5, None))
        assert each["cold"] == (each["round"] == 0)


def test_order_rotates_and_warm_up_is_not_counted(settings: dict[str, Any], tmp_path: Path) -> None:
    models = Models()
    run(SweepConfig(**settings), tmp_path / "out", tools=models.tools)
    timed = [call[0] for call in models.calls if call[3]]
    assert len(timed) == 24
    assert Counter(call[0] for call in models.calls if not call[3]) == dict.fromkeys(set(timed), 1)
    batches = [timed[start : start + 4] for start in range(0, 24, 4)]
    assert {len(set(batch)) for batch in batches} == {4}
    assert len({batch[0] for batch in batches}) == 4
    orders = {row["order"] for row in rows(tmp_path / "out") if row["variant"] == "autoregressive"}
    assert orders == {0, 1, 2, 3}


def test_batches_are_formed_from_the_prompts_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    models = Models()
    run(SweepConfig(**settings | {"batch_sizes": (4,), "repeats": 2}), tmp_path / "out", tools=models.tools)
    found = rows(tmp_path / "out")
    batches: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for row in found:
        key = (row["variant"], row["budget"], row["repeat"])
        batches.setdefault(key, []).append((row["prompt_id"], row["batch_id"]))
    assert len(batches) == 8
    assert len({tuple(members) for members in batches.values()}) == 1
    assert sorted(Counter(row["batch_id"] for row in found if row["method"] == "dflash").values()) == [4, 8]
    assert {call[1] for call in models.calls} == {4, 2}


def test_repeats_and_duplicates_have_noise_of_their_own(settings: dict[str, Any], tmp_path: Path) -> None:
    data(settings, {"prompt": "same"}, {"prompt": "same"}, {"prompt": "same"})
    models = Models()
    config = SweepConfig(**settings | {"temperatures": (1,), "repeats": 2})
    run(config, tmp_path / "out", tools=models.tools)
    keys: dict[str, set[int]] = {}
    for label, _, request, timed, _ in models.calls:
        if timed:
            keys.setdefault(label, set()).add(request.noise_key)
    assert len(keys) == 4
    assert len(set(map(frozenset, keys.values()))) == 1
    assert len(keys["dflash"]) == 6


def stop_after(calls: int) -> Any:
    return lambda number, label, timed: KeyboardInterrupt() if number == calls else None


def test_interrupted_and_damaged_runs_continue(settings: dict[str, Any], tmp_path: Path) -> None:
    config = SweepConfig(**settings | {"temperatures": (0, 1), "batch_sizes": (1, 2)})
    out = tmp_path / "out"
    models = Models(fail=stop_after(70))
    with pytest.raises(KeyboardInterrupt):
        run(config, out, tools=models.tools)
    finished = {file: file.read_bytes() for file in (out / "samples").iterdir()}
    assert len(finished) == 2
    cut = sorted(finished)[0]
    cut.write_bytes(finished.pop(cut)[:-5])

    outcome = run(config, out, tools=Models().tools)
    assert (outcome.units, outcome.measured, outcome.rows) == (4, 3, 96)
    assert str(cut) in outcome.notes[0]
    assert all(file.read_bytes() == content for file, content in finished.items())
    assert len({tuple(row[name] for name in KEY) for row in rows(out)}) == 96

    idle = Models()
    again = run(config, out, tools=idle.tools)
    assert (again.measured, again.rows, again.exit_code, idle.calls) == (0, 96, 0, [])
    with pytest.raises(UsageError, match="max_new_tokens: 8 there, 9 here"):
        run(replace(config, max_new_tokens=9), out, tools=idle.tools)
    assert read_run(out)["loaded"]["must_match"]["drafter_revisions"] == {settings["drafters"]["dflash"]: "r1"}


def test_failures_become_rows_and_are_tried_again(settings: dict[str, Any], tmp_path: Path) -> None:
    def exhausted(number: int, label: str, timed: bool) -> Exception | None:
        if label == "ddtree @32":
            return torch.OutOfMemoryError("tried to allocate\nmuch")
        return ValueError("odd") if label == "dflash" and timed and number % 2 else None

    out = tmp_path / "out"
    outcome = run(SweepConfig(**settings), out, tools=Models(fail=exhausted).tools)
    failed = [row for row in rows(out) if row["status"] == "error"]
    assert outcome.exit_code == 4
    assert outcome.failed == len(failed) > 6
    assert outcome.rows == 24
    errors = {(row["method"], re.sub(r"of up to \d+", "of up to N", row["error"])) for row in failed}
    memory = "out of memory at batch size 1, prompts of up to N tokens and 8 new ones: tried to allocate"
    assert errors == {("ddtree", memory), ("dflash", "ValueError: odd")}
    assert all(row["tokens_out"] is None and row["exactness"] is None for row in failed)
    assert {row["status"] for row in rows(out) if row["budget"] == 16} == {"ok"}

    healed = run(SweepConfig(**settings), out, tools=Models().tools)
    assert (healed.exit_code, healed.measured, healed.rows) == (0, 1, 24)


def test_violation_is_a_verdict_that_stays(settings: dict[str, Any], tmp_path: Path) -> None:
    outcome = run(SweepConfig(**settings), tmp_path / "out", tools=Models(wrong="dflash").tools)
    assert (outcome.exit_code, outcome.violations) == (1, 6)
    assert run(SweepConfig(**settings), tmp_path / "out", tools=Models().tools).exit_code == 1


def test_what_does_not_fit_the_context_is_skipped_for_all(settings: dict[str, Any], tmp_path: Path) -> None:
    sizes, limit = [1, 55, 56, 57, 63, 64, 65, 200, 80_000], 56
    data(settings, *({"id": str(size), "prompt": "x" * size} for size in sizes))
    outcome = run(SweepConfig(**settings), tmp_path / "out", tools=Models(max_context=64).tools)
    found = rows(tmp_path / "out")
    assert {(row["tokens_in"], row["status"]) for row in found} == {
        (size, "ok" if size <= limit else "context") for size in sizes
    }
    assert Counter(row["prompt_id"] for row in found) == dict.fromkeys(map(str, sizes), 4)
    assert {row["tokens_out"] for row in found if row["status"] == "ok"} == {CAP}
    assert outcome.skipped == 6 * 4
    assert outcome.exit_code == 0


def test_prompt_without_tokens_is_skipped(settings: dict[str, Any], tmp_path: Path) -> None:
    config = SweepConfig(**settings | {"prompts": ("", "x")})
    run(config, tmp_path / "out", tools=Models().tools)
    assert Counter(row["status"] for row in rows(tmp_path / "out")) == {"empty": 4, "ok": 4}


def test_chat_continues_the_reference_answer_made_once(settings: dict[str, Any], tmp_path: Path) -> None:
    data(settings, {"turns": ["a", "b", "c"]}, {"prompt": "d"})
    config = SweepConfig(**settings | {"temperatures": (0,), "batch_sizes": (1, 2), "budgets": (16,)})
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, tools=Models(wrong="dflash", fail=stop_after(20)).tools)
    answers = (out / "answers.json").read_text()
    said = "".join(chr(ord("a") + step) for step in range(1, CAP + 1))
    assert json.loads(answers)

    models = Models()
    run(config, out, tools=models.tools)
    assert (out / "answers.json").read_text() == answers
    assert not [call for call in models.calls if call[1] == 1 and call[2].prompt_ids == (ord("a"),)]
    prompts = {turn: {row["prompt_tokens_hash"] for row in rows(out) if row["turn"] == turn} for turn in (0, 1, 2)}
    assert {turn: len(hashes) for turn, hashes in prompts.items()} == {0: 2, 1: 1, 2: 1}
    second = {call[2].prompt_ids for call in models.calls if call[3] and len(call[2].prompt_ids) == CAP + 2}
    assert second == {tuple(map(ord, f"a{said}b"))}
    assert len(rows(out)) == 2 * 4 * 3


def test_two_passes_on_a_gpu(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77)
    monkeypatch.setattr("sparkbench.machine.device_id", lambda device: "GPU-1")
    monkeypatch.setattr("sparkbench.machine.device_name", lambda device: "a GPU")
    models = Models(device="cuda")
    outcome = run(SweepConfig(**settings), tmp_path / "out", tools=models.tools)
    found = rows(tmp_path / "out")
    assert outcome.rows == len({tuple(row[name] for name in KEY) for row in found}) == 48
    assert Counter(row["pass"] for row in found) == {"clean": 24, "profile": 24}
    assert {row["peak_device_bytes"] for row in found} == {77}
    passes = [profile for _, _, _, timed, profile in models.calls if timed]
    firsts = passes[::8]
    assert passes == [each for first in firsts for each in [first] * 4 + [not first] * 4]
    assert sorted(firsts) == [False] * 3 + [True] * 3
    checked = [row for row in found if row["exactness"] is not None]
    assert len(checked) == 48 - 6  # all but AR's clean pass, which is the reference


def test_degenerate_outputs() -> None:
    assert is_degenerate([*range(100), *[7] * 64])
    assert is_degenerate(list(range(16)) * 4)
    assert not is_degenerate(list(range(17)) * 4)
    assert not is_degenerate([7] * 63)
    assert not is_degenerate([*[7] * 64, 8])
