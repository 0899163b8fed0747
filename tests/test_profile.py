"""Profiling: the step curve and its file, what is timed, what a forward needs, shapes, and the command.

No test asserts a time of this machine: clocks are planted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import golden_dflash as golden
import pytest
import torch
from conftest import Scripted, tiny_model, tiny_target
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sparkbench import cli, machine
from sparkbench.decoding.accept import Acceptance
from sparkbench.decoding.loop import DecodeConfig, Request, generate
from sparkbench.decoding.method import Context, Method, NoOptions
from sparkbench.decoding.target import Target
from sparkbench.decoding.tree import DraftTree
from sparkbench.errors import RunError, UsageError
from sparkbench.methods.ddtree import DDTree, Options
from sparkbench.profiling import costs, measure, roofline, shapes
from sparkbench.profiling.curve import StepCurve, StepCurves, isotonic
from sparkbench.profiling.measure import draft_seconds, gathered, step_curve, step_times
from sparkbench.profiling.roofline import Work, measure_peaks
from sparkbench.profiling.shapes import SHAPES, Shape

ROOT = Path(__file__).parents[1]
CURVE = StepCurve.measured(1, 256, (1, 8, 16), (2e-3, 3e-3, 5e-3))


def curves_of(*curves: StepCurve) -> StepCurves:
    return StepCurves("tiny", None, "a device", "float32", 1, {"torch": "2"}, curves or (CURVE,), {"rows": [1]})


# The curve


def test_smoothing_pools_what_falls_and_keeps_what_rises() -> None:
    assert isotonic([1, 2, 2, 5]) == (1, 2, 2, 5)
    assert isotonic([1, 4, 2, 5]) == (1, 3, 3, 5)
    assert isotonic([3, 2, 1]) == (2, 2, 2)
    assert isotonic([1, 6, 5, 1, 9]) == (1, 4, 4, 4, 9)
    assert isotonic([7.5]) == (7.5,)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_smoothing_is_the_closest_non_decreasing_curve(values: list[float], random: Any) -> None:
    """By the inequality that marks a projection onto a convex set, against other non-decreasing curves."""
    smooth = isotonic(values)
    assert list(smooth) == sorted(smooth)
    assert sum(smooth) == pytest.approx(sum(values))
    assert isotonic(smooth) == pytest.approx(smooth)
    others = [sorted(random.uniform(0, 1e3) for _ in values) for _ in range(5)] + [[0.0] * len(values), sorted(values)]
    for other in others:
        inner = sum((v - s) * (o - s) for v, s, o in zip(values, smooth, other, strict=True))
        assert inner <= 1e-6 * (1 + sum(v * v + o * o for v, o in zip(values, other, strict=True)))


def test_smoothing_takes_planted_noise_out_and_keeps_planted_steps() -> None:
    """A staircase with noise of a tenth of a step: the smoothed curve is closer to it, and the steps still stand."""
    tokens = tuple(range(1, 65))
    truth = [1.0 + (token - 1) // 16 for token in tokens]
    draws = torch.Generator().manual_seed(0)
    raw = [t + 0.1 * float(torch.randn(1, generator=draws)) for t in truth]
    curve = StepCurve.measured(1, 256, tokens, raw)

    def error(values: Sequence[float]) -> float:
        return sum((value - t) ** 2 for value, t in zip(values, truth, strict=True))

    assert curve.raw_s == tuple(raw)
    assert any(after < before for before, after in pairwise(raw)), "the noise planted nothing"
    assert error(curve.smooth_s) < 0.5 * error(raw)
    assert all(curve.seconds(edge + 1) - curve.seconds(edge) > 0.5 for edge in (16, 32, 48))


def test_one_planted_outlier_moves_no_other_step() -> None:
    raw = [1.0, 1.0, 1.0, 2.0, 2.0, 9.0, 3.0, 3.0, 10.0]
    smooth = isotonic(raw)
    assert smooth[:5] == tuple(raw[:5])
    assert smooth[5:8] == (5.0, 5.0, 5.0)
    assert smooth[8] == 10.0


def test_seconds_between_and_beyond_the_points() -> None:
    assert [CURVE.seconds(tokens) for tokens in (1, 8, 16)] == pytest.approx([2e-3, 3e-3, 5e-3])
    assert CURVE.seconds(12) == pytest.approx(4e-3)
    assert CURVE.seconds(0) == 2e-3
    assert CURVE.seconds(24) == pytest.approx(7e-3), "the last slope continues"
    falling = StepCurve.measured(1, 1, (4, 8, 16), (2.0, 4.0, 3.0))
    assert falling.seconds(12, raw=True) == 3.5
    assert falling.seconds(32, raw=True) == 3.0, "noise never makes a wider forward cheaper beyond the points"
    assert falling.seconds(12) == falling.seconds(99) == 3.5
    assert StepCurve.measured(2, 1, (4,), (2.0,)).seconds(100) == 2.0


BAD_CURVES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": (), "raw_s": (), "smooth_s": ()}, "ascending"),
    ({"tokens": (1, 1, 2)}, "ascending"),
    ({"tokens": (1, 3, 2)}, "ascending"),
    ({"tokens": (0, 1, 2)}, "whole numbers"),
    ({"tokens": (1, 2.0, 3)}, "whole numbers"),
    ({"batch_size": 0}, "whole numbers"),
    ({"context": True}, "whole numbers"),
    ({"raw_s": (1.0, 2.0)}, "2 values for 3"),
    ({"raw_s": (1.0, 0.0, 2.0)}, "raw_s must hold finite"),
    ({"raw_s": (1.0, float("nan"), 2.0)}, "raw_s must hold finite"),
    ({"smooth_s": (1.0, 2.0, float("inf"))}, "smooth_s must hold finite"),
    ({"smooth_s": (1.0, 3.0, 2.0)}, "smooth_s must not decrease"),
    ({"smooth_s": (1.0, "2", 3.0)}, "smooth_s must hold finite"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CURVES)
def test_a_bad_curve_is_refused_in_memory_and_in_a_file(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = {"batch_size": 1, "context": 9, "tokens": (1, 2, 3), "raw_s": (1.0, 2.0, 3.0), "smooth_s": (1.0, 2.0, 3.0)}
    with pytest.raises(ValueError, match=message):
        StepCurve(**{**good, **change})
    path = tmp_path / "curves.json"
    curves_of().save(path)
    document = json.loads(path.read_text())
    document["curves"] = [{**good, **change}]
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=rf"curves\.json.*{message}") as caught:
        StepCurves.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = curves_of(CURVE, StepCurve.measured(4, 256, (4, 8), (0.1 + 0.2, 1 / 3)))
    path = tmp_path / "new" / "folder" / "curves.json"
    saved.save(path)
    assert StepCurves.load(path) == saved
    saved.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["curves.json"], "nothing temporary stays"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "no step curves"),
        ('{"format": "other"}', "no step curves"),
        ({"version": 2}, "version 2; allowed: 1"),
        ({"curves": []}, "one or more curves"),
        ({"curves": 3}, "3 stands where list"),
        ({"curves": [7]}, "7 stands where dict"),
        ({"curves": [{}]}, "'batch_size' is missing"),
        ({"target": None}, "null stands where str"),
        ({"threads": "1"}, "stands where int"),
        ({"beside": []}, "stands where dict"),
    ],
)
def test_a_bad_file_is_one_line(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    if isinstance(content, dict):
        curves_of().save(path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        StepCurves.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        curves_of().save(tmp_path / "file" / "curves.json")


def test_the_nearest_curve() -> None:
    places = [(1, 128), (1, 1024), (4, 256), (16, 256)]
    curves = curves_of(*(StepCurve.measured(*place, (1, 2), (1.0, 2.0)) for place in places))

    def at(batch_size: int, context: int) -> tuple[int, int]:
        found = curves.at(batch_size, context)
        return found.batch_size, found.context

    assert [at(*place) for place in places] == places
    assert at(1, 500) == (1, 128)
    assert at(1, 577) == (1, 1024)
    assert at(3, 9999) == (4, 256), "3 is nearer to 4 than to 1 by ratio, whatever the context"
    assert at(2, 1024) == (1, 1024), "as near to 1 as to 4: the smaller"
    assert at(100, 1) == (16, 256)
    with pytest.raises(ValueError, match="another batch size or context"):
        curves_of(CURVE, CURVE)


def test_curves_need_no_torch() -> None:
    code = "import sys, sparkbench.profiling.curve; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True)
    assert done.stdout == "[]\n"


# What is timed


class PlantedClock:
    """A clock that only forwards of a target move, and the positions of their nodes.

    A forward over n tokens takes `cost(n)`, its first of a width ten times that (what warming up is for), and all
    become slower by `drift` of their cost a forward.
    """

    def __init__(self, target: Target, cost: Callable[[int], float], drift: float = 0.0) -> None:
        self.now, self.cost, self.drift = 0.0, cost, drift
        self.widths: list[int] = []
        self.positions: list[Any] = []
        self.handle = target.decoder.register_forward_hook(self._moved, with_kwargs=True)

    def _moved(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens = kwargs["input_ids"].numel()
        factor = 1.0 + self.drift * len(self.widths) if tokens in self.widths else 10.0
        self.now += self.cost(tokens) * factor
        self.widths.append(tokens)
        self.positions.append(kwargs["position_ids"])

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def planted() -> Iterator[Callable[..., PlantedClock]]:
    clocks: list[PlantedClock] = []

    def plant(*arguments: Any) -> PlantedClock:
        clocks.append(PlantedClock(*arguments))
        return clocks[-1]

    yield plant
    for clock in clocks:
        clock.handle.remove()


def staircase(tokens: int) -> float:
    return 1.0 + -(-tokens // 8)


def test_the_curve_is_the_planted_one(tiny: Target, planted: Callable[..., PlantedClock]) -> None:
    """Warm-up and prefill are not in it; widths take turns in alternating order."""
    clock = planted(tiny, staircase)
    curve = step_curve(tiny, 1, 20, [16, 1, 4, 4, 9], repeats=3, clock=clock)
    assert (curve.batch_size, curve.context, curve.tokens) == (1, 20, (1, 4, 9, 16))
    assert curve.raw_s == curve.smooth_s == tuple(map(staircase, (1, 4, 9, 16)))
    up = [1, 4, 9, 16]
    assert clock.widths == [20, *up[::-1], *up, *up[::-1], *up]


def test_a_machine_that_slows_down_slows_all_widths(tiny: Target, planted: Callable[..., PlantedClock]) -> None:
    """Planted drift: measured one after the other, the last width would cost far more than its due."""
    widths = [1, 8, 16, 24]
    curve = step_curve(tiny, 1, 20, widths, repeats=9, clock=planted(tiny, staircase, 0.02))
    ratios = [seconds / staircase(width) for width, seconds in zip(widths, curve.raw_s, strict=True)]
    assert max(ratios) / min(ratios) < 1.05
    assert min(ratios) > 1.2, "the drift planted nothing"


def test_batches_round_up_to_whole_nodes_and_have_unequal_rows(
    tiny: Target, planted: Callable[..., PlantedClock]
) -> None:
    clock = planted(tiny, staircase)
    times = step_times(tiny, 4, 20, [1, 2, 5, 8, 12], repeats=1, clock=clock)
    assert [time.tokens for time in times] == [4, 8, 12]
    assert [time.verify_s for time in times] == [staircase(4), staircase(8), staircase(12)]
    assert clock.positions[-1].tolist() == [[20, 21, 21], *[[19, 20, 20]] * 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 20, []), "tokens: give"),
        ((1, 20, [0]), "tokens 0 is not allowed: 1 or above"),
        ((0, 20, [1]), "batch size 0"),
        ((1, 0, [1]), "context 0"),
        ((1, 500, [13]), "context 500 and 13 nodes exceed target tiny qwen3's context of 512"),
        ((1, 20, [1], 0), "repeats 0"),
    ],
)
def test_what_cannot_be_measured(tiny: Target, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        step_curve(tiny, *arguments)


def test_curves_say_where_they_come_from(tiny: Target) -> None:
    curves = gathered(tiny, [CURVE])
    assert (curves.target, curves.revision, curves.dtype) == ("tiny qwen3", None, "float32")
    assert (curves.threads, curves.versions["torch"]) == (torch.get_num_threads(), torch.__version__)
    assert curves.device
    assert curves.curves == (CURVE,)


class Recording(Method):
    """Drafts what it is told, as a chain or as a tree with one wrong sibling each, and records what it is given."""

    def __init__(self, length: int, branch: int, max_length: int | None = None) -> None:
        super().__init__(NoOptions(), None, None)
        self.length, self.branch, self.limit = length, branch, max_length
        self.begun: tuple[int, int] | None = None
        self.seen: list[dict[str, Any]] = []
        self.accepted: list[list[int]] = []

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (0, 1)

    @property
    def max_nodes(self) -> int:
        return self.length * (1 + self.branch)

    @property
    def max_length(self) -> int | None:
        return self.limit

    def begin(self, target: Target, batch: int, capacity: int) -> None:
        self.begun = batch, capacity

    def propose(self, context: Context) -> DraftTree:
        assert context.features is not None
        self.seen.append(
            {
                "round": context.round,
                "lengths": context.lengths.tolist(),
                "counts": list(context.counts),
                "features": tuple(context.features.shape),
            }
        )
        assert context.features.isfinite().all()
        with context.stage("draft"):
            drafts = torch.arange(1, self.length + 1).expand(len(context.anchors), -1)
        if not self.branch:
            return DraftTree.chain_of(context.anchors, drafts)
        return Planned(drafts, self.length).propose(context)

    def observe(self, context: Context, tree: DraftTree, acceptance: Acceptance) -> None:
        self.accepted.append(acceptance.accepted.tolist())


class Planned(Scripted):
    """A scripted method that takes its drafts from a tensor."""

    def __init__(self, drafts: Any, length: int) -> None:
        super().__init__([], [], length=length, branch=1)
        self.planned, self.vocab = drafts, 97

    def drafts(self, context: Context) -> Any:
        return self.planned


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("branch", [0, 1])
def test_a_drafter_is_driven_as_the_loop_drives_it(tiny: Target, branch: int, batch: int) -> None:
    """Lengths, counts and features agree with what was accepted, round by round; most rounds accept three tokens."""
    method = Recording(5, branch)
    seconds = draft_seconds(tiny, method, batch, 20, repeats=4)
    assert seconds is not None
    assert seconds > 0
    assert len(method.seen) == 6, "the cold round, one that warms up, four that count"
    cold = method.seen[0]
    lengths = [20] + [19] * (batch - 1)
    assert cold == {"round": 0, "lengths": lengths, "counts": lengths, "features": (batch, 20, 64)}
    for number, (seen, accepted) in enumerate(zip(method.seen[1:], method.accepted, strict=False), 1):
        counts = [count + 1 for count in accepted]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        assert seen == {"round": number, "lengths": lengths, "counts": counts, "features": (batch, max(counts), 64)}
    assert all(count >= 3 for accepted in method.accepted for count in accepted)
    assert method.begun is not None
    assert method.begun[0] == batch
    assert method.begun[1] >= max(lengths) + method.max_nodes + 1


def test_drafting_is_timed_in_warm_rounds(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the cold round takes a thousand times as long as the others."""
    ticks = iter([0, 7_000_000, 0, 9_000_000, *[0, 5_000] * 3])
    monkeypatch.setattr("sparkbench.decoding.timing.time.perf_counter_ns", lambda: next(ticks))
    assert draft_seconds(tiny, Recording(3, 0), 1, 20, repeats=3) == pytest.approx(5e-6)


def test_a_drafter_with_too_short_a_context_is_left_out(tiny: Target) -> None:
    assert draft_seconds(tiny, Recording(3, 0, max_length=60), 1, 50, repeats=3) is None
    assert draft_seconds(tiny, Recording(3, 0), 1, 505, repeats=3) is None


def test_published_layouts_are_timed() -> None:
    pair = golden.Pair.load()
    for name in ("dflash", "ddtree_16"):
        assert draft_seconds(pair.target, pair.method(name), 2, 30, repeats=1)


# What a forward needs


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_counted_by_hand(tied: bool) -> None:
    """3 layers, hidden 32, 4 heads and 2 key-value heads of 8, MLP 48, vocabulary 97, float32."""
    model = tiny_model()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    work = Work.of(Target.wrap(model))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    weights = 3 * layer + 97 * 32
    norms = 3 * (2 * 32 + 2 * 8) + 32
    assert work.dense_products == weights
    assert work.dense_bytes == 4 * (weights + norms)
    cache = 3 * 2 * 2 * 8 * 10 * 5
    assert work.read_bytes(5, 10, 15) == 4 * (weights + norms + 15 * 32 + cache)
    assert work.flops(5, 10, 15) == 2 * 15 * weights + 3 * 4 * 4 * 8 * 15 * (10 + 3)


def test_a_window_bounds_what_is_read() -> None:
    """Every second layer of the mixed model sees 6 positions, its own included."""
    full, mixed = (Work.of(tiny_target(family)) for family in ("qwen3", "qwen3-mixed"))
    row = 2 * 2 * 8 * 4
    assert full.read_bytes(1, 100, 1) - mixed.read_bytes(1, 100, 1) == row * (100 - 5)
    assert full.read_bytes(1, 4, 1) == mixed.read_bytes(1, 4, 1)
    assert full.flops(1, 100, 1) - mixed.flops(1, 100, 1) == 4 * 4 * 8 * (100 - 5)


@pytest.mark.parametrize("batch", [1, 3])
def test_flops_are_what_torch_counts(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward over trees of 7 nodes behind 20 tokens, its attention written out as products that torch sees."""

    def written_out(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3)
        return (scores + attn_mask).softmax(-1) @ value

    target = tiny_target()
    session = target.session(batch, 64)
    with torch.inference_mode():
        session.prefill([[1] * 20] * batch)
        packed = session.pack(measure._tree(target, batch, 7, torch.Generator().manual_seed(0)))
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", written_out)
        with FlopCounterMode(display=False) as counter:
            session.verify(packed)
    # Some releases of transformers make the rotary angles by a small product, too.
    angles = 2 * 7 * batch * target.head_dim // 2
    assert counter.get_total_flops() - Work.of(target).flops(batch, 20, 7 * batch) in (0, angles)


def test_peaks_are_the_best_of_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted times: the warm-up is the shortest and does not count."""
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 4096)
    monkeypatch.setitem(roofline.SIDE, "cpu", 16)
    reads, products = [0.1, 5.0, 4.0, 2.0, 3.0, 9.0, 9.0, 9.0], [0.1, 8.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    ticks = iter([tick for duration in reads + products for tick in (0.0, duration)])
    peaks = measure_peaks(torch.device("cpu"), torch.bfloat16, clock=lambda: next(ticks))
    assert (peaks.bytes_per_s, peaks.flops_per_s) == (4096 / 2.0, 2 * 16**3 / 8.0)
    assert (peaks.read_bytes, peaks.side, peaks.dtype) == (4096, 16, "bfloat16")


# Shapes

TINY = Shape(32, 3, 4, 2, 8, 48, tied=True, vocabulary=97)
TINY_MOE = Shape(32, 3, 4, 2, 8, 24, tied=False, experts=16, active=2, vocabulary=97)


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    billions = {name: round(shape.parameters / 1e9, 2) for name, shape in SHAPES.items()}
    assert billions == {
        "qwen3-0.6b": 0.6,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-14b": 14.77,
        "qwen3-30b-a3b": 30.53,
    }
    moe = SHAPES["qwen3-30b-a3b"]
    inactive = moe.layers * (moe.experts - moe.active) * 3 * moe.hidden * moe.mlp
    assert round((moe.parameters - inactive) / 1e9, 1) == 3.4, "A3B: active parameters, the embedding included"


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_what_its_config_builds(name: str) -> None:
    """Without weights: the model's own count, and its architecture."""
    from transformers import AutoModelForCausalLM

    shape, label = shapes.named(name, 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    assert sum(weight.numel() for weight in model.parameters()) == shape.parameters
    assert label == f"{name} (random weights, 2 of {SHAPES[name].layers} layers)"
    assert shapes.named(name)[0] is SHAPES[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [TINY, TINY_MOE], ids=["dense", "experts"])
def test_random_weights_make_a_sound_target(shape: Shape, dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    target, again, other = (shapes.random_target(shape, "random", dtype, device, seed) for seed in (0, 0, 1))
    target.check_trees()
    weights = dict(target.model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert sum(weight.numel() for weight in weights.values()) == shape.parameters
    assert ("lm_head.weight" in weights) != shape.tied
    for name, weight in weights.items():
        assert torch.equal(weight, again.model.get_parameter(name))
        if weight.dim() > 1:
            assert not torch.equal(weight, other.model.get_parameter(name))
            deviation = 1.0 if "embed" in name else 0.02
            assert weight.float().std().item() == pytest.approx(deviation, rel=0.15)
        else:
            assert (weight == 1).all()


def test_the_rotary_embedding_is_the_one_a_plain_model_has() -> None:
    from transformers import AutoModelForCausalLM

    target = shapes.random_target(TINY, "random", torch.bfloat16, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_config(TINY.config())
    found = target.decoder.rotary_emb.inv_freq
    assert found.dtype == torch.float32
    assert torch.equal(found, plain.model.rotary_emb.inv_freq)


def test_too_little_memory_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 billion parameters of 2 bytes; the model would be built only after the check."""
    monkeypatch.setattr(machine, "free_bytes", lambda device: 8_000_000_000)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", None)
    with pytest.raises(RunError, match=r"target four needs 8\.0 GB of memory and 8\.0 GB are free on cpu"):
        shapes.random_target(SHAPES["qwen3-4b"], "four", torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(machine, "free_bytes", lambda device: None)
    shapes.require("anything", 10**18, torch.device("cpu"))


def test_free_memory_is_known_here() -> None:
    if not os.path.exists("/proc/meminfo"):
        pytest.skip("the system does not tell")
    free = machine.free_bytes(torch.device("cpu"))
    assert free is not None
    assert 10**6 < free < 10**14


# The command


@pytest.fixture
def invoke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in an empty folder, with a roofline small enough for a test and two tiny shapes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 2**16)
    monkeypatch.setitem(roofline.SIDE, "cpu", 16)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "tiny-moe", TINY_MOE)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["profile", "--repeats", "1", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


GOLDEN = ("--target", str(golden.FOLDER / "target"), "--drafter", f"dflash={golden.FOLDER / 'draft'}")
Invoke = Callable[..., tuple[int, str, str]]


def test_a_profile_of_real_weights(invoke: Invoke) -> None:
    grid = ("--tokens", "1,4,16", "--context", "20,40", "--batch-size", "1", "--batch-size", "2")
    code, out, err = invoke(*GOLDEN, *grid, "--out", "mine.json", "--threads", "1")
    assert code == 0, err
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in out
    header = "BATCH  CONTEXT  TOKENS  PACK MS  VERIFY MS  SMOOTHED  BANDWIDTH  ARITHMETIC"
    at = lines.index(header)
    rows = [line.split() for line in lines[at + 1 : at + 12]]
    assert [row[:3] for row in rows[:6]] == [["1", context, t] for context in ("20", "40") for t in ("1", "4", "16")]
    assert [row[:3] for row in rows[6:9]] == [["2", "20", "2"], ["2", "20", "4"], ["2", "20", "16"]]
    assert sum(line.startswith("dflash ") for line in lines) == 4
    assert lines[-1] == "step curve in mine.json"
    assert "EXPERTS" not in out
    assert err.splitlines()[-1].startswith("9/9 ")
    curves = StepCurves.load("mine.json")
    assert [(c.batch_size, c.context, c.tokens) for c in curves.curves] == [
        (1, 20, (1, 4, 16)),
        (1, 40, (1, 4, 16)),
        (2, 20, (2, 4, 16)),
        (2, 40, (2, 4, 16)),
    ]
    assert len(curves.beside["rows"]) == 12
    assert {entry["method"] for entry in curves.beside["drafts"]} == {"dflash"}


def test_json_is_one_document_that_agrees_with_the_file(invoke: Invoke) -> None:
    code, out, err = invoke("--shape", "tiny-moe", "--layers", "2", "--tokens", "1,8", "--context", "12", "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["out"] == "results/profile-tiny-moe-2-layers-cpu.json"
    assert document["target"] == "tiny-moe (random weights, 2 of 3 layers)"
    curves = StepCurves.load(document["out"])
    assert document["curves"][0]["raw_s"] == list(curves.curves[0].raw_s)
    assert document["experts"] == curves.beside["experts"]
    one, eight = document["experts"]
    assert (one["tokens"], one["distinct"], one["uniform"]) == (1, 2.0, 2.0)
    assert 2 < eight["distinct"] <= 16
    for row in document["rows"]:
        share = row["read_bytes"] / row["raw_s"] / document["peaks"]["bytes_per_s"]
        assert row["of_bandwidth"] == pytest.approx(share)
        share = row["flops"] / row["raw_s"] / document["peaks"]["flops_per_s"]
        assert row["of_peak"] == pytest.approx(share)
    assert document["drafts"] == []


def test_a_mixture_shows_its_experts_and_a_cut_shape_its_layers(invoke: Invoke) -> None:
    code, out, err = invoke("--shape", "tiny-moe", "--layers", "1", "--tokens", "1,8", "--context", "12")
    assert code == 0, err
    assert "tiny-moe (random weights, 1 of 3 layers) on " in out
    assert "DISTINCT EXPERTS  IF UNIFORM" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_help_names_all_shapes() -> None:
    from sparkbench.cli.profile import NAMED

    tails = NAMED.removeprefix("qwen3").replace(" or", ",").split(", ")
    assert [f"qwen3{tail}" for tail in tails] == list(SHAPES)


def test_a_context_too_long_for_the_drafter_is_said(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkbench.methods.dflash.DFlash.max_length", 30)
    code, out, err = invoke(*GOLDEN, "--tokens", "1", "--context", "28")
    assert code == 0, err
    assert "dflash: its context is too short for batch size 1, context 28" in err
    assert "DRAFTER" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--shape", "qwen3-5b"), 2, "unknown shape 'qwen3-5b'; known: qwen3-0.6b"),
        (("--shape", "tiny", "--layers", "4"), 2, "--layers 4 is not allowed: tiny has 1 to 3"),
        (("--layers", "4"), 2, "--layers cuts a --shape; name one"),
        (("--shape", "tiny", "--target", "embedded"), 2, "--target and --revision have no meaning"),
        (("--tokens", "1,x"), 2, "--tokens 'x' is not allowed: whole numbers, 1 or above"),
        (("--tokens", "0"), 2, "--tokens '0' is not allowed"),
        (("--context", ","), 2, "--context: give at least one number"),
        (("--batch-size", "-1"), 2, "--batch-size '-1' is not allowed"),
        (("--repeats", "0"), 2, "repeats 0 is not allowed"),
        (("--dtype", "int8"), 2, "dtype 'int8' is not allowed"),
        (("--device", "tpu", "--shape", "tiny"), 2, "unknown device 'tpu'"),
        (("--shape", "tiny", "--drafter", "autoregressive=x"), 2, "--drafter autoregressive: it has"),
        (("--shape", "tiny", "--drafter", "nope=x"), 2, "unknown method 'nope'"),
        (("--shape", "tiny", "--out", "."), 2, "--out . is a folder; name a file"),
        (("--shape", "tiny", "--context", "40960"), 2, "exceed target tiny (random weights)'s context of 40960"),
        (("--shape", "tiny", "--context", "9", "--batch-size", "99999999"), 4, "profiling tiny (random weights) needs"),
    ],
)
def test_bad_values_are_one_line(arguments: tuple[str, ...], code: int, message: str, invoke: Invoke) -> None:
    found, out, err = invoke(*arguments)
    assert (found, out) == (code, "")
    last = err.splitlines()[-1]
    assert last.startswith("sparkbench: error: ")
    assert message in last


@pytest.mark.slow
def test_the_embedded_target_needs_no_options(invoke: Invoke) -> None:
    code, out, err = invoke()
    assert code == 0, err
    assert "step curve in results/profile-embedded-cpu.json" in out


def test_what_a_round_costs_beside_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree method is measured at two real widths, and a search whose time grows with the tree has a slope."""
    pair = golden.Pair.load()
    method = DDTree(Options(budget="auto"), pair.drafter, None)
    seen: list[int] = []

    def beside(target: Target, measured: DDTree, rows: int) -> float:
        def watch(context: Any, tree: DraftTree, acceptance: Acceptance) -> None:
            seen.append(tree.width - 1)

        prompt = Request(tuple(golden.document("e2e")["cases"][0]["prompt_ids"]))
        generate(target, measured, [prompt] * rows, DecodeConfig(12, stop_ids=frozenset()), watch)
        return 1.0 + 0.5 * seen[-1]

    monkeypatch.setattr(costs, "_beside_forward", beside)
    curves = costs.measure_curves(pair.target, [1], 64)
    found = costs.measure_overheads(pair.target, method, curves, [1, 2])
    assert set(seen) == {8, 64}
    assert found == {1: (1.0, 0.5), 2: (1.0, 0.5)}
    assert method.cap is None
