"""A service's application behind a real uvicorn, in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve the application on a free port; yields a client whose base is its address."""
    listener = socket.socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    served = asyncio.create_task(server._serve([listener]))
    try:
        async with asyncio.timeout(20):
            while not server.started:
                if served.done():
                    served.result()
                await asyncio.sleep(0.01)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession(base, timeout=aiohttp.ClientTimeout(total=20)) as client:
            yield client
    finally:
        server.should_exit = True
        await served
