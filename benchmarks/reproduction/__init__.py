"""The paper's claims at small scale: what `benchmarks/reproduce.py` is made of."""
