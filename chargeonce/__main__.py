"""`python -m chargeonce`: the command where no console script is installed."""

from chargeonce.cli import main

if __name__ == "__main__":
    main()
