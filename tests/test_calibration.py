"""Sequential temperature scaling: by simulation with known temperatures, and against a search written plainly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkbench.errors import RunError, UsageError
from sparkbench.scheduling import Calibration, calibration_table, expected_calibration_error, fit_sts
from sparkbench.scheduling.calibration import auroc

TRUE = (2.0, 0.5, 1.5, 0.7)


def rollouts(seed: int, rounds: int = 20_000, true: tuple[float, ...] = TRUE) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, L] and accepted counts [N] of rounds in which slot k is accepted with sigmoid(logit / true[k])."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 2.0, (rounds, len(true)))
    accepted = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / np.array(true)))
    return logits, np.cumprod(accepted, axis=1).sum(1)


def held_out(calibration: Calibration) -> float:
    """The largest ECE of any position on rollouts no fit here has seen."""
    table = calibration_table(*rollouts(99), calibration)
    return max(row.ece_after for row in table if row.ece_after is not None)


def test_known_temperatures_come_back() -> None:
    calibration = fit_sts(*rollouts(1))
    # The ECE is flat around its minimum: a few per cent for the first slot, more below, where fewer prefixes live.
    assert calibration.temperatures == pytest.approx(TRUE, rel=0.15)
    assert calibration == fit_sts(*rollouts(1))
    for row in calibration_table(*rollouts(99), calibration):
        assert row.ece_before is not None
        assert row.ece_after is not None
        assert row.ece_after < 0.016 < row.ece_before
        assert row.ece_after < 0.6 * row.ece_before


def test_fits_that_are_wrong_are_found_out() -> None:
    """The held-out error tells the right fit from each of these, so the test above can fail."""
    logits, accepted = rollouts(1)
    slots = range(len(TRUE))
    alone = [fit_sts(logits[:, [k]], accepted > k).temperatures[0] for k in slots]  # no product of earlier slots
    backwards = fit_sts(logits[:, ::-1], accepted).temperatures[::-1]
    planted = {
        "each slot alone": Calibration(tuple(alone)),
        "slots in the wrong order": Calibration(backwards),
        "indicator one slot late": fit_sts(logits, np.maximum(accepted - 1, 0)),
        "indicator one slot early": fit_sts(logits, np.minimum(accepted + 1, len(TRUE))),
        "divided by the wrong side": Calibration(tuple(1 / t for t in fit_sts(logits, accepted).temperatures)),
    }
    right = held_out(fit_sts(logits, accepted))
    for name, calibration in planted.items():
        assert held_out(calibration) > 2 * right, name


def plain_ece(predicted: list[float], happened: list[bool]) -> float:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(20)]
    for p, hit in zip(predicted, happened, strict=True):
        bins[min(int(p * 20), 19)].append((p, hit))
    total = 0.0
    for members in filter(None, bins):
        n = len(members)
        total += n / len(predicted) * abs(sum(p for p, _ in members) / n - sum(hit for _, hit in members) / n)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_each_temperature_is_the_best_given_the_earlier_ones(seed: int) -> None:
    """Nothing on a plain grid beats the fit; rounds that did not propose a slot are left out (their logits are NaN)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1, 2, (300, 3))
    lengths = rng.integers(0, 4, 300)
    logits[np.arange(3) >= lengths[:, None]] = np.nan
    accepted = np.minimum(rng.integers(0, 4, 300), lengths)
    fitted = fit_sts(logits, accepted, lengths).temperatures
    for k in range(3):
        rows = lengths > k

        def error(temperature: float, k: int = k, rows: np.ndarray = rows) -> float:
            scaled = logits[rows, : k + 1] / np.array([*fitted[:k], temperature])
            return plain_ece(np.prod(1 / (1 + np.exp(-scaled)), axis=1).tolist(), (accepted[rows] > k).tolist())

        tried = [error(temperature) for temperature in np.geomspace(0.2, 5, 33)]
        assert error(fitted[k]) <= min(tried) + 1e-12
        assert max(tried) > min(tried) + 0.01


def test_ties_keep_a_temperature_of_one() -> None:
    """Logits of 0 are one half at every temperature, and a slot no round proposed has no error at all."""
    assert fit_sts(np.zeros((50, 2)), np.ones(50)).temperatures == (1.0, 1.0)
    logits, accepted = rollouts(3, 2000, (2.0, 1.0))
    cut = fit_sts(logits, np.minimum(accepted, 1), np.ones(2000))
    assert cut.temperatures[1] == 1.0 < cut.temperatures[0]
    unseen = calibration_table(logits, np.minimum(accepted, 1), cut, np.ones(2000))[1]
    assert (unseen.position, unseen.count) == (2, 0)
    assert [unseen.ece_before, unseen.ece_after, unseen.auroc, unseen.brier] == [None] * 4


def test_expected_calibration_error() -> None:
    assert expected_calibration_error([0.5, 0.5, 0.5, 0.5], [1, 0, 1, 0]) == 0
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0
    assert expected_calibration_error([0.0, 1.0], [1, 0]) == 1
    # Two bins: 0.12 and 0.14 together, off by |0.26 - 1| / 2; 0.9 alone, off by 0.1.
    assert expected_calibration_error([0.12, 0.14, 0.9], [1, 0, 1]) == pytest.approx((0.74 + 0.1) / 3)
    assert expected_calibration_error([0.12, 0.14, 0.9], [1, 0, 1], bins=1) == pytest.approx(abs(1.16 - 2) / 3)
    rng = np.random.default_rng(4)
    for _ in range(20):
        predicted, happened = rng.random(200), rng.random(200) < 0.5
        expected = plain_ece(predicted.tolist(), happened.tolist())
        assert expected_calibration_error(predicted, happened) == pytest.approx(expected)


def test_auroc_counts_pairs() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores, happened = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.4
        pairs = [(x > y) + (x == y) / 2 for x in scores[happened] for y in scores[~happened]]
        assert auroc(scores, happened) == pytest.approx(np.mean(pairs))
    assert auroc([0.1, 0.2], [True, True]) is None
    assert auroc([], []) is None


def test_table_says_what_it_says() -> None:
    logits = np.array([[0.0, 2.0], [0.0, -2.0], [4.0, 2.0], [-4.0, 1.0]])
    first, second = calibration_table(logits, [1, 0, 2, 0], Calibration((2.0, 1.0)), [1, 2, 2, 2])
    sure = 1 / (1 + np.exp(-2.0))
    assert (first.position, first.count, second.position, second.count) == (1, 4, 2, 3)
    assert first.brier == pytest.approx((0.25 + 0.25 + 2 * (1 - sure) ** 2) / 4)
    assert first.ece_after == pytest.approx(2 * (1 - sure) / 4)
    assert first.ece_before == pytest.approx(2 * (1 - 1 / (1 + np.exp(-4.0))) / 4)
    assert first.auroc == pytest.approx((4 - 0.5) / 4)
    products = np.array([0.5 * (1 - sure), sure * sure, (1 - sure) / (1 + np.exp(-1.0))])
    assert second.brier == pytest.approx(np.mean((products - [0, 1, 0]) ** 2))
    assert second.auroc == 1.0
    swapped = calibration_table([[2.0, 0.0], [0.0, 2.0]], [2, 1], Calibration((4.0, 1.0)))[1]
    assert swapped.auroc == 0.0  # equal products before, the wrong way round after


def test_confidences_have_the_shape_of_the_logits() -> None:
    calibration = Calibration((1.0, 2.0, 0.5))
    logits = np.random.default_rng(6).normal(0, 3, (2, 4, 3))
    confidences = calibration.confidences(logits)
    assert confidences == pytest.approx(1 / (1 + np.exp(-logits / np.array([1.0, 2.0, 0.5]))))
    assert calibration.survival(logits) == pytest.approx(np.cumprod(confidences, axis=-1))
    assert calibration.confidences([0.0, 4.0]) == pytest.approx([0.5, 1 / (1 + np.exp(-2))])
    assert Calibration.identity(2).confidences([-1e5, 1e5]).tolist() == [0.0, 1.0]
    with pytest.raises(UsageError, match="3 slots, the drafts have 4"):
        calibration.confidences([0.0] * 4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    calibration = Calibration((0.1 + 0.2, 2.0), {"drafter": "d", "rounds": 7})
    calibration.save(path)
    loaded = Calibration.load(path)
    assert loaded == calibration
    assert loaded.provenance == {"drafter": "d", "rounds": 7}
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]
    with pytest.raises(RunError, match="cannot write"):
        calibration.save(path / "below" / "a-file")


def document(**changes: Any) -> str:
    return json.dumps({"format": "sparkbench calibration 1", "temperatures": [1.0], "provenance": {}} | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("\x00", "not JSON"),
        ("[]", "not a calibration"),
        ("{}", "not a calibration"),
        (document(format="other"), "not a calibration"),
        (document(temperatures=None), "not a list of numbers"),
        (document(temperatures=[1.0, True]), "not a list of numbers"),
        (document(temperatures=["1"]), "not a list of numbers"),
        (document(temperatures=[]), "one temperature a slot"),
        (document(temperatures=[1.0, 0.0]), "from 0.001 to 1000"),
        (document(temperatures=[float("nan")]), "from 0.001 to 1000"),
        (document(temperatures=[10**400]), "from 0.001 to 1000"),
        (document(provenance=[]), "provenance"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        Calibration.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("logits", "accepted", "lengths", "said"),
    [
        (np.zeros(4), [0] * 4, None, "shape"),
        (np.zeros((4, 0)), [0] * 4, None, "shape"),
        (np.zeros((4, 2)), [0] * 3, None, "as many counts"),
        (np.zeros((4, 2)), [0] * 4, [2], "as many counts"),
        (np.zeros((1, 2)), [3], None, "accepted <= proposed"),
        (np.zeros((1, 2)), [2], [1], "accepted <= proposed"),
        (np.zeros((1, 2)), [-1], None, "accepted <= proposed"),
        (np.array([[np.nan, 0.0]]), [0], [1], "not finite"),
    ],
)
def test_bad_rollouts_are_refused(
    logits: np.ndarray, accepted: list[int], lengths: list[int] | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        fit_sts(logits, accepted, lengths)
