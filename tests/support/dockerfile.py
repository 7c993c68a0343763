"""Reads Dockerfiles as far as ours go: stages, instructions, environment."""

import json
import re
import shlex
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `flags` are the leading `--name=value`."""

    word: str
    text: str
    flags: dict[str, str]

    @property
    def arguments(self) -> list[str]:
        """The words, in the JSON form or split as a shell would."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclass(slots=True)
class Stage:
    """FROM to the next FROM."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A parsed file."""

    stages: tuple[Stage, ...]

    @classmethod
    def parse(cls, text: str) -> "Dockerfile":
        """Comments and continuation lines as Docker reads them."""
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        stages: list[Stage] = []
        for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
            if not line.strip():
                continue
            word, _, rest = line.strip().partition(" ")
            flags: dict[str, str] = {}
            while match := re.match(r"\s*--([a-z]+)=(\S+)\s+", rest):
                flags[match[1]] = match[2]
                rest = rest[match.end() :]
            if word.upper() == "FROM":
                base, *named = rest.split()
                stages.append(Stage(named[1] if named else str(len(stages)), base))
            else:
                stages[-1].instructions.append(Instruction(word.upper(), rest.strip(), flags))
        return cls(tuple(stages))

    def stage(self, name: str) -> Stage | None:
        """The stage of a name; the last one for an empty name."""
        if not name:
            return self.stages[-1]
        return next((stage for stage in self.stages if stage.name == name), None)

    def chain(self, target: str) -> list[Stage]:
        """The target's stages from the outermost base to the target itself; empty where there is none."""
        found: list[Stage] = []
        stage = self.stage(target)
        while stage is not None:
            found.insert(0, stage)
            stage = next((s for s in self.stages if s.name == stage.base), None)
        return found

    def instructions(self, target: str, word: str) -> list[Instruction]:
        """All of one word along the target's chain, in order."""
        return [i for stage in self.chain(target) for i in stage.instructions if i.word == word]

    def environment(self, target: str) -> dict[str, str]:
        """ENV along the chain; `$PATH` stays as written."""
        return dict(
            part.partition("=")[::2] for i in self.instructions(target, "ENV") for part in i.arguments
        )
