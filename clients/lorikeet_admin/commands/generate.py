"""`lorikeet generate`: stream text from the base model or an adapter."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from lorikeet_admin.constraint_options import structured_output
from lorikeet_admin.exits import ExitCode
from lorikeet_admin.output import Output, short_digest
from lorikeet_admin.session import Json, session
from lorikeet_admin.tables import short_name
from lorikeet_admin.token_options import logit_bias_option
from lorikeet_client import (
    ChatMessage,
    Completion,
    Delta,
    FinishReason,
    GenerateOptions,
    GenerationStream,
    SamplingParams,
    Timings,
)


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Option(help="Raw text to continue; - reads it from stdin.")] = None,
    chat: Annotated[
        str | None, typer.Option(help="A user's message, through the model's template; - reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before --chat.")] = None,
    template_arguments: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="""Further variables of --chat's template: '{"reasoning_effort": "high"}'."""
        ),
    ] = None,
    adapter: Annotated[
        # No square brackets: typer takes them for markup.
        str | None,
        typer.Option(help="name, name@alias, tenant/name or tenant/name@alias; absent: the base model."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=2**32 - 1)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens at least so many times as likely as the best.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2, over the output.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2, over the output.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: less of what prompt and output have.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1)] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, max=2**32 - 1, help="Samples; printed one after another.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=2**32 - 1, help="Most tokens to generate.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Tokens before anything stops the text.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Add this to a token's logit, -100 to 100; repeatable."),
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Not generated; repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable.")] = None,
    stop_token: Annotated[
        list[int] | None, typer.Option(min=0, max=2**32 - 1, help="Stop at this token id; repeatable.")
    ] = None,
    include_stop_string: Annotated[
        bool, typer.Option("--include-stop-string", help="Keep what stopped the text at its end.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    keep_special_tokens: Annotated[
        bool, typer.Option("--keep-special-tokens", help="Show special tokens, such as Harmony's channels.")
    ] = False,
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON of this schema; - reads it from stdin.")
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The answer is some JSON object.")
    ] = False,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="The answer keeps to this Lark grammar; - reads it from stdin.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; repeatable.")] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="With --json-schema, --json-object: no whitespace in JSON.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="With --json: log-probabilities, with so many alternatives (0: no others).",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="With --json: the same of the prompt's tokens.")
    ] = None,
    request_id: Annotated[str, typer.Option(help="Name the request, e.g. to abort it.")] = "",
    as_json: Json = False,
) -> None:
    """Stream text; with --json one delta a line, the last with its finish."""
    if context.args:
        raise typer.BadParameter(f"unexpected {' '.join(context.args)!r}: use --prompt or --chat for a text")
    if (prompt is None) == (chat is None):
        raise typer.BadParameter("give one of --prompt and --chat")
    if system is not None and chat is None:
        raise typer.BadParameter("--system goes with --chat")
    if template_arguments is not None and chat is None:
        raise typer.BadParameter("--template-arguments go with --chat")
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise typer.BadParameter(
            "--logprobs and --prompt-logprobs go with --json: text has no place for them"
        )
    options = GenerateOptions(
        request_id=request_id,
        sampling=SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            skip_special_tokens=False if keep_special_tokens else None,
            stop_strings=stop or (),
            stop_token_ids=stop_token or (),
            include_stop_string=include_stop_string,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=logit_bias_option(logit_bias or ()),
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            min_tokens=min_tokens,
            bad_words=bad_word or (),
            n=n,
            structured_output=structured_output(
                json_schema, grammar, json_object=json_object, regex=regex, choice=choice, compact=compact
            ),
        ),
    )
    if adapter is not None:
        options["adapter"] = adapter
    if chat is not None:
        turns = [ChatMessage("user", _text(chat))]
        options["chat"] = [ChatMessage("system", system), *turns] if system is not None else turns
    if template_arguments is not None:
        options["template_arguments"] = _json_object(template_arguments)
    text = None if prompt is None else _text(prompt)
    with (
        session(context, as_json=as_json) as at,
        at.client.generate(text, timeout_s=at.timeout_s, **options) as stream,
    ):
        reasons = {sample.finish.reason for sample in _print(stream, at.output).samples}
        if FinishReason.DEADLINE in reasons:
            raise typer.Exit(ExitCode.TIMEOUT)
        if FinishReason.ABORTED in reasons:
            raise typer.Exit(ExitCode.FAILED)


class _Text:
    """Writes each sample as it comes, once those before it have ended; several get a heading each."""

    def __init__(self, num_samples: int) -> None:
        self._pending = [""] * num_samples
        self._has_ended = [False] * num_samples
        self._index = -1
        self._is_in_line = False

    def add(self, delta: Delta) -> None:
        """Write what can be shown with this delta."""
        self._pending[delta.index] += delta.text
        self._has_ended[delta.index] = delta.finish is not None
        if self._index < 0:
            self._next_sample()
        self._write_pending()
        while self._has_ended[self._index] and self._index + 1 < len(self._pending):
            self.end_line()
            self._next_sample()
            self._write_pending()
        sys.stdout.flush()

    def end_line(self) -> None:
        """The cursor must not stay behind the text, whatever ended it."""
        if self._is_in_line:
            self._write("\n")

    def _next_sample(self) -> None:
        self._index += 1
        if len(self._pending) > 1:
            self._write(f"--- sample {self._index}\n")

    def _write_pending(self) -> None:
        text, self._pending[self._index] = self._pending[self._index], ""
        self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        self._is_in_line = not text.endswith("\n") if text else self._is_in_line


def _print(stream: GenerationStream, output: Output) -> Completion:
    text = _Text(len(stream.samples))
    try:
        for delta in stream:
            if output.as_json:
                output.json_line(delta)
            else:
                text.add(delta)
    finally:
        if not output.as_json:
            text.end_line()
            sys.stdout.flush()
    whole = stream.whole()
    output.note(_summary(whole))
    return whole


def _summary(whole: Completion) -> str:
    """With the server's times: deltas may reach this command in bursts, long after they were made."""
    usage, finish = whole.usage, whole.finish
    parts = [
        f"[{', '.join(sample.finish.reason for sample in whole.samples)}]",
        f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached) + {usage.output_tokens} output tokens",
    ]
    begun = [sample.finish for sample in whole.samples if sample.finish.usage.output_tokens]
    if begun:
        parts.append(f"first token {min(_first_token_ms(end.timings) for end in begun):.0f} ms")
        # The samples of a request decode side by side; none of their first tokens took decoding.
        num_decoded, decode_ms = usage.output_tokens - len(begun), max(end.timings.decode_ms for end in begun)
        if num_decoded and decode_ms:
            parts.append(f"{1000 * num_decoded / decode_ms:.0f} tokens/s")
    if used := finish.adapter:
        parts.append(f"{short_name(used.revision)} {short_digest(used.digest)} (was {used.tier_hit})")
    else:
        parts.append("base model")
    return ", ".join(parts)


def _first_token_ms(timings: Timings) -> float:
    return timings.queue_ms + timings.adapter_wait_ms + timings.prefill_ms


def _json_object(argument: str) -> dict[str, Any]:
    try:
        value: object = json.loads(argument)
    except ValueError as error:
        raise typer.BadParameter(f"--template-arguments is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("--template-arguments is not a JSON object")
    return cast("dict[str, Any]", value)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument
