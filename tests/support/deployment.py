"""The deployment files as one value, so that a test can change a word of one and look at the result."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.compose_file import interpolated, parse_compose
from tests.support.dockerfile import Dockerfile

ROOT = Path(__file__).resolve().parents[2]
COMPOSE, TLS = "compose.yaml", "deploy/compose.tls.yaml"
FILES = (
    COMPOSE,
    TLS,
    "constraints-gpu.txt",
    "deploy/inference-service.Dockerfile",
    "deploy/adapter-manager.Dockerfile",
    "deploy/env.example",
    "deploy/prometheus.yaml",
    ".dockerignore",
    "pyproject.toml",
    "docs/deploy.md",
    "docs/performance.md",
)
# What somebody would write into .env.
VARIABLES = {
    "LORIKEET_NODE_TOKEN": "a" * 64,
    "LORIKEET_REDIS_PASSWORD": "b" * 64,
    "LORIKEET_MODEL_DIR": "./examples/storyteller/model",
    "LORIKEET_MODEL_NAME": "storyteller",
    "LORIKEET_TLS_DIR": "./tls",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """Texts by path."""

    texts: Mapping[str, str]

    @classmethod
    def read(cls) -> "Deployment":
        """As the repository has them."""
        return cls({name: (ROOT / name).read_text() for name in FILES})

    def changed(self, path: str, old: str, new: str) -> "Deployment":
        """With the first `old` of one file replaced; it must be there."""
        assert old in self.texts[path], f"{old!r} is not in {path}"
        return dataclasses.replace(self, texts={**self.texts, path: self.texts[path].replace(old, new, 1)})

    def compose(self, *overrides: str, variables: Mapping[str, str] = VARIABLES) -> dict[str, Any]:
        """compose.yaml with other files merged onto it, interpolated."""
        return interpolated(parse_compose([self.texts[name] for name in (COMPOSE, *overrides)]), variables)

    def dockerfile(self, path: str) -> Dockerfile | None:
        """A parsed Dockerfile; None where there is none of that path."""
        return Dockerfile.parse(self.texts[path]) if path in self.texts else None

    def pyproject(self) -> dict[str, Any]:
        """The parsed pyproject.toml."""
        return _parse_toml(self.texts["pyproject.toml"])

    def image_of(self, service: Mapping[str, Any]) -> tuple[Dockerfile, str] | None:
        """Dockerfile and target that a service is built from; None for an image from elsewhere."""
        if (build := service.get("build")) is None:
            return None
        parsed = self.dockerfile(build["dockerfile"])
        return (parsed, build.get("target", "")) if parsed else None


@functools.cache
def _parse_toml(text: str) -> dict[str, Any]:
    return tomllib.loads(text)
