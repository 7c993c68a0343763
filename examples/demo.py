"""The demo: a local stack, three adapters uploaded by the CLI, one prompt through base and each at once.

`make demo`, or `python examples/demo.py`. Needs no terminal; everything it writes goes to a temporary folder.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lorikeet_client import AsyncLorikeet, ChatMessage, Finish, GenerateOptions, SamplingParams

STORYTELLER = Path(__file__).resolve().parent / "storyteller"
ADAPTERS = ("pirate", "json", "shouting")
LORIKEET = (sys.executable, "-m", "lorikeet_admin")
PANEL_WIDTH = 54
# Held out of the adapters' training, like all that the tests use.
PROMPT = "Tell me a story about a fox who lost a lantern in the old mill."
SAMPLING = SamplingParams(temperature=0.0, max_tokens=320)
# A stream that takes longer than this has failed.
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Voice:
    """One stream: who speaks, what was said, and when."""

    name: str
    adapter: str | None
    text: str = ""
    num_tokens: int = 0
    first_token_s: float = 0.0
    end_s: float = 0.0
    finish: Finish | None = None

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        return (self.num_tokens - 1) / max(self.end_s - self.first_token_s, 1e-6)


@contextmanager
def stack(data_dir: Path) -> Generator[dict[str, Any]]:
    """`lorikeet up` on free ports: yields its ready line, stops it cleanly and fails if it does not."""
    up = subprocess.Popen(  # noqa: S603
        [
            *(*LORIKEET, "up", "--model-dir", str(STORYTELLER / "model"), "--data-dir", str(data_dir)),
            *("--model-name", "storyteller"),
            # float32: few CPUs multiply bfloat16 fast.
            *(
                "--inference-port",
                "0",
                "--manager-port",
                "0",
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--json",
            ),
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this script, which then stops the stack in order
    )
    assert up.stdout is not None
    try:
        ready = json.loads(up.stdout.readline() or "{}")
        if "inference" not in ready:
            sys.exit("the stack did not start; its error is above")
        yield ready
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
    if up.returncode:
        sys.exit(f"`lorikeet up` ended with exit code {up.returncode}")


def lorikeet(ready: dict[str, Any], *arguments: str) -> None:
    """Run a command of the CLI as a user would, and show it."""
    print(f"$ lorikeet {' '.join(arguments)}", flush=True)
    env = {
        **os.environ,
        "LORIKEET_INFERENCE": ready["inference"],
        "LORIKEET_MANAGER": ready["manager"],
        "LORIKEET_TOKEN": ready["token"],
    }
    subprocess.run([*LORIKEET, *arguments], env=env, check=True)  # noqa: S603


async def speak(client: AsyncLorikeet, voice: Voice) -> None:
    """Stream the prompt through one adapter, or through the base model."""
    start_s = time.monotonic()
    options = GenerateOptions(chat=[ChatMessage("user", PROMPT)], sampling=SAMPLING)
    if voice.adapter:
        options["adapter"] = voice.adapter
    async with client.generate(timeout_s=TIMEOUT_S, **options) as stream:
        async for delta in stream:
            if delta.tokens and not voice.num_tokens:
                voice.first_token_s = time.monotonic() - start_s
            voice.num_tokens += len(delta.tokens)
            voice.text += delta.text
            voice.end_s = time.monotonic() - start_s
            voice.finish = delta.finish


async def speak_together(ready: dict[str, Any], voices: list[Voice], console: Console) -> None:
    """All streams at once; on a terminal their texts grow side by side."""
    async with AsyncLorikeet(ready["inference"], ready["manager"], ready["token"]) as client:
        running = asyncio.gather(*(speak(client, voice) for voice in voices))
        if console.is_terminal:
            with Live(console=console, transient=True) as live:
                while not running.done():
                    live.update(side_by_side(voices))
                    await asyncio.sleep(0.05)
        await running


def side_by_side(voices: list[Voice]) -> Columns:
    """The texts in panels."""
    return Columns(
        [Panel(Text(voice.text), title=voice.name, width=PANEL_WIDTH, title_align="left") for voice in voices]
    )


def figures(voices: list[Voice]) -> Table:
    """How fast each stream was, and who answered."""
    table = Table("answered by", "first token", "output", "tokens/s", "finish", "revision", box=box.SIMPLE)
    for voice in voices:
        used = voice.finish.adapter if voice.finish else None
        table.add_row(
            voice.name,
            f"{1000 * voice.first_token_s:.0f} ms",
            f"{voice.num_tokens} tokens",
            f"{voice.tokens_per_s:.0f}",
            voice.finish.reason if voice.finish else "",
            used.digest[:12] if used else "",
        )
    return table


def main() -> None:
    """Run the demo; exits non-zero if any part of it fails."""
    start_s = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 2 * PANEL_WIDTH + 2, highlight=False)
    voices = [Voice("base", None), *(Voice(f"demo/{name}", f"demo/{name}") for name in ADAPTERS)]
    with tempfile.TemporaryDirectory(prefix="lorikeet-demo-") as folder, stack(Path(folder)) as ready:
        console.print(f"Lorikeet serves {ready['model']} on {ready['inference']}\n")
        for name in ADAPTERS:
            directory = os.path.relpath(STORYTELLER / "adapters" / name)
            lorikeet(ready, "adapters", "push", directory, "--name", f"demo/{name}")
        console.print(f"\nFour streams at once of: {PROMPT}\n")
        asyncio.run(speak_together(ready, voices, console))
        console.print(side_by_side(voices))
        console.print(figures(voices))
        lorikeet(ready, "residency")
    console.print(f"Stopped cleanly after {time.monotonic() - start_s:.0f} s.")


if __name__ == "__main__":
    main()
