"""A message's structured output to a checked constraint; whether it compiles is found later. Pure."""

from collections.abc import Sequence

from inference_service.api.field_errors import limit_error, refuse
from inference_service.domain.structured_output import Constraint, ConstraintKind
from lorikeet.inference.v1 import generation_pb2

FIELD = "sampling.structured_output"
# A schema of a thousand properties has a tenth of it.
_MAX_BYTES = 256 << 10
_MAX_CHOICES = 4096


def read_constraint(message: generation_pb2.SamplingParams) -> Constraint | None:
    """Check and read `structured_output`.

    Raises:
        InvalidRequestError: no constraint is set, or an empty one.
        LimitExceededError: it is larger than a limit, which is named.
    """
    if not message.HasField("structured_output"):
        return None
    output = message.structured_output
    field = output.WhichOneof("constraint")
    if field is None:
        refuse(FIELD, "empty", "set one of json_schema, json_object, regex, grammar and choice")
    kind = ConstraintKind(field)
    if kind not in {ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT} and output.disable_any_whitespace:
        refuse(f"{FIELD}.disable_any_whitespace", "true", "it goes with json_schema and json_object only")
    allows_whitespace = not output.disable_any_whitespace
    if kind is ConstraintKind.JSON_OBJECT:
        if not output.json_object:
            refuse(f"{FIELD}.json_object", "false", "set it to true, or leave structured_output out")
        return Constraint(kind, allows_whitespace=allows_whitespace)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, choices=_choices(output.choice.values))
    text: str = getattr(output, field)
    if not text:
        refuse(f"{FIELD}.{field}", "empty", "say what the answer must look like")
    _check_size(f"{FIELD}.{field}", len(text.encode()))
    return Constraint(kind, text, allows_whitespace=allows_whitespace)


def shown(constraint: Constraint) -> tuple[str, str]:
    """Field and shortened value of a constraint, for an error."""
    text = ascii(list(constraint.choices) if constraint.choices else constraint.text)
    value = "true" if constraint.kind is ConstraintKind.JSON_OBJECT else text
    return f"{FIELD}.{constraint.kind.value}", value if len(value) <= 80 else value[:77] + "..."


def _choices(values: Sequence[str]) -> tuple[str, ...]:
    field = f"{FIELD}.choice"
    if not values:
        refuse(field, "empty", "name the texts to choose from")
    if len(values) > _MAX_CHOICES:
        raise limit_error(
            f"{field} has {len(values)} texts; this server's max_choices is {_MAX_CHOICES}: send "
            f"at most {_MAX_CHOICES}, or write them as a regex or a grammar",
            field,
            "max_choices",
            len(values),
            _MAX_CHOICES,
        )
    _check_size(field, sum(len(value.encode()) for value in values))
    for index, value in enumerate(values):
        if not value:
            refuse(f"{field}.values[{index}]", "empty", "name a text, or leave it out")
    return tuple(dict.fromkeys(values))


def _check_size(field: str, num_bytes: int) -> None:
    if num_bytes > _MAX_BYTES:
        raise limit_error(
            f"{field} has {num_bytes} bytes; this server's max_constraint_bytes is {_MAX_BYTES}: shorten it",
            field,
            "max_constraint_bytes",
            num_bytes,
            _MAX_BYTES,
        )
