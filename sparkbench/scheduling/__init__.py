"""What a drafter's own estimates of acceptance are good for: how much of a draft to verify.

    calibration.py   confidence logits -> probabilities that can be believed (sequential temperature scaling)
    prefix.py        how many tokens of each row's chain to verify, without biasing the output
    budget.py        how many nodes of each row's tree to verify

Pure functions of numbers. What a step costs comes in as a callable, tokens -> seconds; measuring it is elsewhere.
"""

from sparkbench.scheduling.budget import tree_width
from sparkbench.scheduling.calibration import Calibration, calibration_table, expected_calibration_error, fit_sts
from sparkbench.scheduling.prefix import (
    DelayedCapacity,
    StepCost,
    admit,
    admit_capacity,
    capacity,
    threshold_lengths,
)

__all__ = [
    "Calibration",
    "DelayedCapacity",
    "StepCost",
    "admit",
    "admit_capacity",
    "calibration_table",
    "capacity",
    "expected_calibration_error",
    "fit_sts",
    "threshold_lengths",
    "tree_width",
]
