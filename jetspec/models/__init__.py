"""Target models: loading, the forward over rows, and linear layers for CPUs."""
