"""`python -m jetspec` is the command line interface."""

from jetspec.cli import main

if __name__ == "__main__":
    main()
