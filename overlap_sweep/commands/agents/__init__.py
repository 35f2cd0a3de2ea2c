"""The tools that `overlap-sweep mcp` gives to agents: doors to what the commands use, with typed answers."""
