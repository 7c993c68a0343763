"""Whether services can be soaked at all."""

from collections.abc import Generator
from contextlib import contextmanager

from lorikeet_bench.soak.leftovers import delete_leftovers
from lorikeet_bench.soak.plan import SOAK_SHAPE, SoakTarget, base_answer
from lorikeet_client import AsyncLorikeet, AuthError, Model, NotFoundError, SamplingParams


class WrongTargetError(Exception):
    """The services cannot be soaked; the message says why."""


@contextmanager
def known_tenant() -> Generator[None]:
    """The services know the token; what they refuse inside is the tenant's name."""
    try:
        yield
    except (AuthError, NotFoundError) as error:
        raise WrongTargetError(f"{error}: --tenant must name the tenant of the token") from error


async def check_target(client: AsyncLorikeet, target: SoakTarget, *, clean: bool) -> Model:
    """The idle model; raises WrongTargetError if a soak would judge it wrongly."""
    model = await client.get_model()
    if model.vocab_size != SOAK_SHAPE.vocab:
        raise WrongTargetError(
            f"{model.name} is not the soak's base model: serve the one that `lorikeet bench rig DIR` writes"
        )
    answer = await client.complete(token_ids=[1], sampling=SamplingParams(temperature=0.0, max_tokens=4))
    if tuple(token.id for token in answer.tokens) != base_answer(1, 4):
        raise WrongTargetError(
            f"{model.name} does not answer as the soak's base model does: serve the one that "
            "`lorikeet bench rig DIR` writes"
        )
    if clean and (why := await delete_leftovers(client, target.tenant)):
        raise WrongTargetError(f"adapters of an earlier soak could not be deleted: {why}")
    with known_tenant():
        adapters = [adapter async for adapter in client.list_adapters(target.tenant)]
    if adapters:
        raise WrongTargetError(
            f"tenant {target.tenant} has adapters: a soak needs an empty one; --clean deletes those named "
            "soak-NN, which a soak that was killed has left"
        )
    return await client.get_model()
