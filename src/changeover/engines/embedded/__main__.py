"""``python -m changeover.engines.embedded``: bind the port, load in the background, serve, drain on
SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

# A waiting OpenMP thread spins by default. Where a client, a trainer or another server shares the cores, a
# spinning thread takes the time that the working one waits for: measured 10 to 20 times slower with one busy
# neighbour on two cores. Must be set before torch loads its OpenMP runtime.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from aiohttp import web

from changeover.engines.embedded.api import build_app
from changeover.engines.embedded.config import ServerConfig, parse_arguments
from changeover.engines.embedded.service import Service, Stage
from changeover.machine.errors import ChangeoverError

log = logging.getLogger("changeover.embedded")

CLOSE_TIMEOUT_S = 5.0
"""How long open connections may take to close after the last answer."""


async def serve(config: ServerConfig) -> int:
    """Serve until stopped; the process's exit status."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def finish(code: int) -> None:
        if not stopped.done():
            stopped.set_result(code)

    def on_fatal(error: BaseException) -> None:
        log.error("cannot serve: %s: %s", type(error).__name__, error)
        finish(error.exit_code if isinstance(error, ChangeoverError) else 1)

    service = Service(config, on_fatal)
    terminations = 0

    async def finish_after_drain() -> None:
        await service.drained()
        finish(0)

    draining: asyncio.Task[None] | None = None

    def on_termination(name: str) -> None:
        nonlocal terminations, draining
        terminations += 1
        loading = service.stage is Stage.LOADING
        log.info("%s: %s", name, "stopping at once" if loading or terminations > 1 else "finishing what runs")
        service.drain()
        if loading:
            finish(0)
            return
        if terminations > 1:
            service.cancel_all()
        if draining is None:
            draining = asyncio.create_task(finish_after_drain())

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_termination, signal.Signals(signum).name)
    runner = web.AppRunner(
        build_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", config.host, config.port, error)
        return 2
    log.info("listening on http://%s:%d, not ready yet", config.host, config.port)
    service.start()
    code = await stopped
    await runner.cleanup()
    return code


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    code = asyncio.run(serve(parse_arguments(sys.argv[1:])))
    log.info("exit %d", code)
    sys.stdout.flush()
    sys.stderr.flush()
    # The model's thread may be inside torch, which cannot be interrupted; nothing is left to save.
    os._exit(code)


if __name__ == "__main__":
    main()
