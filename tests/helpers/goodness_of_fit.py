"""The chi-square test, for seeded samples."""

import torch


def chi_square_p(counts, probabilities):
    """Chance that samples of `probabilities` [V] differ from them at least as much as counts [V] do."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "an impossible outcome occurred"
    expected = probabilities[possible].double() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((possible.sum().item() - 1) / 2, dtype=torch.float64)
    return 1.0 if freedom == 0 else torch.special.gammaincc(freedom, statistic / 2).item()
