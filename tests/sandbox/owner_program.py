"""An owner to be killed: opens a box of the kind it is told, starts a long program, says so, and waits."""

import asyncio
import os
import sys
import warnings

from agentrl.sandbox import SandboxOptions, open_sandbox


async def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    async with open_sandbox(SandboxOptions(kind=kind, slots=1)) as pool, pool.box() as box:
        running = asyncio.create_task(box.exec(["sleep", f"4{os.getpid()}"], timeout=4000))
        await asyncio.sleep(0)  # asked for; when the program runs depends on the machine
        print("running", flush=True)
        await running


asyncio.run(main(sys.argv[1]))
