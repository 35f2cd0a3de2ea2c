"""Calls a tool of `overlap-sweep mcp` and prints what it answers, as an agent without a client of its own would:

    python benchmarks/mcp_call.py [--root DIR] [--allow-run] --list
    python benchmarks/mcp_call.py [--root DIR] [--allow-run] TOOL ['{"argument": "value"}']

The exit status is 1 if the tool answers with an error.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

PACKAGE = Path(__file__).resolve().parent.parent


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", nargs="?")
    parser.add_argument("arguments", nargs="?", type=json.loads, default={})
    parser.add_argument("--root", default=".", help="directory that the server may read")
    parser.add_argument("--allow-run", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the tools with their arguments")
    given = parser.parse_args()
    if not given.tool and not given.list:
        parser.error("name a tool, or give --list")
    words = ["-m", "overlap_sweep", "mcp", "--root", given.root, *["--allow-run"] * given.allow_run]
    started = StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": str(PACKAGE)})
    async with Client(stdio_client(started)) as client:
        if given.list:
            print(f"{client.instructions}\n")
            for tool in (await client.list_tools()).tools:
                print(f"{tool.name}: {tool.description}\n  {json.dumps(tool.input_schema['properties'])}\n")
            return 0
        answer = await client.call_tool(given.tool, given.arguments)
        if answer.is_error:
            print(f"error: {answer.content[0].text}", file=sys.stderr)
            return 1
        print(json.dumps(answer.structured_content, indent=1, ensure_ascii=False))
        return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
