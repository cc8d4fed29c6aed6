"""Load tests of a server: requests at given rates, and what each of them waited for."""
