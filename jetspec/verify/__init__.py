"""Checks that a draft does not change a target's output: same greedy tokens, same seeded samples, same distribution."""

from jetspec.verify.checks import Difference, Report, TokenCheck, first_difference, verify
from jetspec.verify.distribution import FitCheck, fit_check
from jetspec.verify.logits import next_logits

__all__ = [
    "Difference",
    "FitCheck",
    "Report",
    "TokenCheck",
    "first_difference",
    "fit_check",
    "next_logits",
    "verify",
]
