"""Where the checked-in fixtures lie: models, adapters, golden outputs."""

from pathlib import Path

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
