"""`python -m trainyard`: the same as the command `trainyard`."""

from trainyard.cli import main

if __name__ == "__main__":
    main()
