"""`python -m chargeonce.stack`: fetch and prepare what the stack needs, so that nothing needs the network later."""

import asyncio
import sys

from chargeonce.stack import StackError, prepare

if __name__ == "__main__":
    try:
        asyncio.run(prepare())
    except StackError as error:
        sys.exit(f"chargeonce: {error}")
