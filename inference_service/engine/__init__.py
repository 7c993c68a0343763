"""The engine process and its client: the step loop on one side, asyncio on the other."""
