"""The options of `lorikeet generate` that are about single tokens."""

from collections.abc import Sequence

import typer


def logit_bias_option(given: Sequence[str]) -> dict[int, float] | None:
    """Biases by token id from "ID=VALUE" texts, None where there are none; raises BadParameter."""
    biases = dict[int, float]()
    for text in given:
        token, _, value = text.partition("=")
        try:
            token_id, bias = int(token), float(value)
        except ValueError as error:
            raise typer.BadParameter(
                f"--logit-bias {text!r} is not ID=VALUE, a token's id and what to add, such as 13=-2.5"
            ) from error
        if token_id in biases:
            raise typer.BadParameter(f"--logit-bias names token {token_id} twice")
        biases[token_id] = bias
    return biases or None
