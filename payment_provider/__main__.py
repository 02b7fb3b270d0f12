"""`python -m payment_provider` is the command `payment-provider`."""

from payment_provider.app import main

main()
