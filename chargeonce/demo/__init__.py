"""The demo: creates orders, breaks things on purpose, and proves that each order was charged exactly once."""

from chargeonce.demo.load import DemoFailedError
from chargeonce.demo.run import Demo

__all__ = ["Demo", "DemoFailedError"]
