"""Calls a tool of `overlap-sweep mcp` and prints what it answers, as an agent without a client of its own would:

    python benchmarks/mcp_call.py [--root DIR] [--allow-run] --list
    python benchmarks/mcp_call.py [--root DIR] [--allow-run] TOOL ['{"argument": "value"}']

The exit status is 1 if the tool answers with an error.
"""

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client


class Answer(NamedTuple):
    text: str
    is_error: bool


PACKAGE = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", nargs="?")
    parser.add_argument("arguments", nargs="?", type=json.loads, default={})
    parser.add_argument("--root", default=".", help="directory that the server may read")
    parser.add_argument("--allow-run", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the tools with their arguments")
    given = parser.parse_args()
    if not given.tool and not given.list:
        parser.error("name a tool, or give --list")
    answer = asyncio.run(answer_of(given))
    # Whoever reads it may stop, as `head` does.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(answer.text, file=sys.stderr if answer.is_error else sys.stdout)
    return int(answer.is_error)


async def answer_of(given: argparse.Namespace) -> Answer:
    words = ["-m", "overlap_sweep", "mcp", "--root", given.root, *["--allow-run"] * given.allow_run]
    started = StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": str(PACKAGE)})
    async with Client(stdio_client(started)) as client:
        if given.list:
            tools = (await client.list_tools()).tools
            listed = (f"{one.name}: {one.description}\n  {json.dumps(one.input_schema['properties'])}" for one in tools)
            return Answer("\n\n".join([client.instructions, *listed]), is_error=False)
        answer = await client.call_tool(given.tool, given.arguments)
        if answer.is_error:
            return Answer(f"error: {answer.content[0].text}", is_error=True)
        return Answer(json.dumps(answer.structured_content, indent=1, ensure_ascii=False), is_error=False)


if __name__ == "__main__":
    sys.exit(main())
