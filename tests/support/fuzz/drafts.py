"""From a seed to a mutated adapter directory: the same one every time."""

import random

from tests.support.fuzz.adapter_draft import Draft, read_draft
from tests.support.fuzz.config_mutations import CONFIG_TEXTS, CONFIG_VALUES
from tests.support.fuzz.file_mutations import FILES
from tests.support.fuzz.header_mutations import HEADER_TEXTS, HEADER_VALUES, has_whole_entry
from tests.support.fuzz.sources import sources
from tests.support.fuzz.tensor_mutations import TENSORS

# In the order in which they can be done; how often each is drawn.
_STAGES = (
    (CONFIG_VALUES, 5),
    (TENSORS, 6),
    (HEADER_VALUES, 3),
    (CONFIG_TEXTS, 2),
    (HEADER_TEXTS, 2),
    (FILES, 2),
)


def make_draft(seed: int) -> Draft:
    """One to four mutations of one source."""
    rng = random.Random(seed)
    source = rng.choice(sources())
    draft = read_draft(source.model, source.name, source.config, source.weights)
    stages = rng.choices(
        range(len(_STAGES)), [weight for _, weight in _STAGES], k=rng.choice([1, 1, 1, 2, 2, 3, 4])
    )
    for stage, (mutations, _) in enumerate(_STAGES):
        if stage == 2:
            draft.serialise()
        if stage == 3:
            draft.finish()
        for _ in range(stages.count(stage)):
            if _has_material(stage, draft):
                rng.choice(mutations)(rng, draft)
    return draft


def _has_material(stage: int, draft: Draft) -> bool:
    """Whether earlier mutations left anything to take hold of."""
    match stage:
        case 0:
            return bool(draft.config)
        case 1:
            return bool(draft.tensors)
        case 2:
            return all(has_whole_entry(header) for header in draft.headers.values())
        case _:
            return bool(draft.files) and all(draft.files.values())
