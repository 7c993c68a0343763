"""`sampling.sample` on a GPU: no sort, no host sync; the same tokens as the reference, but for rounding.

A row's vocabulary is scanned in chunks, a program each:

1. largest logit and its id (greedy rows end here);
2. the largest w_v / e_v, w = exp((logit - largest) / temperature), and the sum of w;
3. with top_p, whether that token lies inside the set: the sum of w over the tokens ranked before it is below
   top_p of all. If not, nothing from it on is in the set, so the same question goes to the best of the tokens
   before it. Most rows end at the first question, whose scan needs no noise. After MAX_ROUNDS rounds in
   parallel the rows that are left are finished by one program each.

With top_k the first scan goes over what ranks before the end that `top_k_bounds` finds; with min_p over what
weighs at least that much. Both cut the ranking's end off: what ranks before a candidate is in them too.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# A NaN is what differs from itself; Triton takes no keyword in a nested call of constants.
# ruff: noqa: PLR0124, FBT003

import torch
import triton
import triton.language as tl

from lorikeet_kernels.sampling.top_k_bounds import top_k_bounds

MAX_ROUNDS = 3
BLOCK = 1024
FEW_ROWS = 16
NO_TOKEN = tl.constexpr(-1)
# a row's state: what is asked about next, and whether the row is done
_STATE = tl.constexpr(4)  # float32: candidate's logit, largest logit, sum of w, unused


@triton.jit
def _mix(x):
    """As sampling._mix, on 32-bit words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed_ptr, position_ptr, row):
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = (position & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(_mix(low) ^ high)
    key = _mix(key ^ place) + place * 0x9E3779B1
    return key, _mix(low ^ 0x5BD1E995)


@triton.jit
def _noise(token, key, salt):
    """Standard exponential variates, as sampling.exponential_noise."""
    h = _mix(_mix(token.to(tl.uint32) ^ key) + salt)
    u = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # exact for the small ones, which decide
    # -log1p(-u), exact near 0
    y = 1.0 - u
    d = y - 1.0
    return tl.where(d == 0.0, u, tl.log(y) * (u / d))


@triton.jit
def _best(value, token):
    """The largest value of a block and the lowest token that has it."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0)


@triton.jit(do_not_specialize=["vocab", "chunk_tokens", "stride", "num_chunks"])
def _largest_kernel(
    logits_ptr, largest_ptr, ids_ptr, vocab, chunk_tokens, stride, num_chunks, BLOCK: tl.constexpr
):
    """largest[row, chunk], NaN where any logit is, and its id."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, vocab)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf"))
        x = x.to(tl.float32)
        bad += (x != x).to(tl.int32)
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        where = tl.where(is_larger, token, where)
    best, token = _best(largest, where)
    best = tl.where(tl.sum(bad, axis=0) > 0, float("nan"), best)
    tl.store(largest_ptr + row * num_chunks + chunk, best)
    tl.store(ids_ptr + row * num_chunks + chunk, token)


@triton.jit
def _row_largest(largest_ptr, ids_ptr, row, CHUNKS: tl.constexpr):
    """(largest logit, its lowest id, whether it is finite)."""
    c = tl.arange(0, CHUNKS)
    parts = tl.load(largest_ptr + row * CHUNKS + c)
    is_bad = tl.max((parts != parts).to(tl.int32), axis=0) > 0
    best, token = _best(parts, tl.load(ids_ptr + row * CHUNKS + c))
    is_finite = (best < float("inf")) & (best > float("-inf")) & (is_bad == 0)
    return best, token, is_finite


@triton.jit
def _scan(
    logits_at, begin, end, largest, temperature, key, salt, bound, bound_id, min_p, BOUNDED: tl.constexpr,
    HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(best w / e, its id, its logit, sum of w) over [begin, end); BOUNDED: of what ranks before it.

    HAS_MIN_P: of what weighs as much as min_p; the largest weighs 1.
    """
    best = tl.full([BLOCK], -1.0, tl.float32)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    logit = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_at + token, mask=token < end, other=float("-inf")).to(tl.float32)
        counts = token < end
        if BOUNDED:
            counts = counts & ((x > bound) | ((x == bound) & (token < bound_id)))
            wanted = tl.max(counts.to(tl.int32), axis=0) > 0
        else:
            wanted = True
        if wanted:
            w = tl.exp((x - largest) / temperature)
            if HAS_MIN_P:
                counts = counts & (w >= min_p)
            w = tl.where(counts, w, 0.0)
            total += w
            ratio = tl.where(counts, w / _noise(token, key, salt), -1.0)
            is_better = ratio > best
            best = tl.where(is_better, ratio, best)
            where = tl.where(is_better, token, where)
            logit = tl.where(is_better, x, logit)
    top, token = _best(best, where)
    # of lanes that hold the same best, the one with the lowest token
    its_logit = tl.max(tl.where((best == top) & (where == token), logit, float("-inf")), axis=0)
    return top, token, its_logit, tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["vocab", "chunk_tokens", "stride", "num_chunks"])
def _mass_kernel(
    logits_ptr, temperature_ptr, state_ptr, tokens_ptr, done_ptr, mass_ptr, vocab, chunk_tokens, stride,
    num_chunks, BLOCK: tl.constexpr,
):  # fmt: skip
    """mass[row, chunk]: the sum of w over what ranks before an open row's candidate."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(done_ptr + row) != 0:
        return
    temperature = tl.load(temperature_ptr + row)
    bound = tl.load(state_ptr + row * _STATE)
    largest = tl.load(state_ptr + row * _STATE + 1)
    bound_id = tl.load(tokens_ptr + row).to(tl.int32)
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, vocab)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf"))
        x = x.to(tl.float32)
        counts = (x > bound) | ((x == bound) & (token < bound_id))
        total += tl.where(counts, tl.exp((x - largest) / temperature), 0.0)
    tl.store(mass_ptr + row * num_chunks + chunk, tl.sum(total, axis=0))


@triton.jit
def _is_inside(mass_ptr, top_p_ptr, state_ptr, row, CHUNKS: tl.constexpr):
    """Whether the candidate of an open row lies in its set."""
    before = tl.sum(tl.load(mass_ptr + row * CHUNKS + tl.arange(0, CHUNKS)), axis=0)
    return before < tl.load(top_p_ptr + row) * tl.load(state_ptr + row * _STATE + 2)


@triton.jit(do_not_specialize=["vocab", "chunk_tokens", "stride"])
def _draw_kernel(
    logits_ptr, largest_ptr, ids_ptr, temperature_ptr, top_p_ptr, seed_ptr, position_ptr, state_ptr,
    tokens_ptr, done_ptr, mass_ptr, parts_ptr, part_ids_ptr, bounds_ptr, ends_ptr, min_p_ptr, vocab,
    chunk_tokens, stride, CHUNKS: tl.constexpr, BOUNDED: tl.constexpr, HAS_TOP_K: tl.constexpr,
    HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts[row, chunk] = (best ratio, its logit, sum of w); BOUNDED: of what ranks before it.

    HAS_TOP_K and HAS_MIN_P are of the first scan: what ranks before its token is in the row's set.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    bound = 0.0
    bound_id = 0
    min_p = 0.0
    if HAS_TOP_K:
        bound = tl.load(bounds_ptr + row)
        bound_id = tl.load(ends_ptr + row)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row)
    if BOUNDED:
        if tl.load(done_ptr + row) != 0:
            return
        if _is_inside(mass_ptr, top_p_ptr, state_ptr, row, CHUNKS):
            return
        largest = tl.load(state_ptr + row * _STATE + 1)
        bound = tl.load(state_ptr + row * _STATE)
        bound_id = tl.load(tokens_ptr + row).to(tl.int32)
    else:
        largest, _, is_finite = _row_largest(largest_ptr, ids_ptr, row, CHUNKS)
        if is_finite == 0:
            return
    key, salt = _row_key(seed_ptr, position_ptr, row)
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, vocab)
    top, token, logit, total = _scan(
        logits_ptr + row.to(tl.int64) * stride, begin, end, largest, temperature, key, salt, bound,
        bound_id, min_p, BOUNDED or HAS_TOP_K, HAS_MIN_P, BLOCK,
    )  # fmt: skip
    at = parts_ptr + (row * CHUNKS + chunk) * 3
    tl.store(at, top)
    tl.store(at + 1, logit)
    tl.store(at + 2, total)
    tl.store(part_ids_ptr + row * CHUNKS + chunk, token)


@triton.jit
def _merge(parts_ptr, part_ids_ptr, row, CHUNKS: tl.constexpr):
    """(best token, its logit, sum of w) over a row's chunks."""
    c = tl.arange(0, CHUNKS)
    at = parts_ptr + (row * CHUNKS + c) * 3
    ratio = tl.load(at)
    ids = tl.load(part_ids_ptr + row * CHUNKS + c)
    top, token = _best(ratio, ids)
    logit = tl.max(tl.where((ratio == top) & (ids == token), tl.load(at + 1), float("-inf")), axis=0)
    return token, logit, tl.sum(tl.load(at + 2), axis=0)


@triton.jit
def _first_kernel(
    largest_ptr, ids_ptr, temperature_ptr, top_p_ptr, state_ptr, tokens_ptr, done_ptr, parts_ptr,
    part_ids_ptr,
    CHUNKS: tl.constexpr, ALL_GREEDY: tl.constexpr, HAS_TOP_P: tl.constexpr,
):  # fmt: skip
    """The rows' first candidates, and which are final."""
    row = tl.program_id(0)
    largest, token, is_finite = _row_largest(largest_ptr, ids_ptr, row, CHUNKS)
    chosen = tl.where(is_finite, token, NO_TOKEN)
    if ALL_GREEDY:
        tl.store(tokens_ptr + row, chosen.to(tl.int64))
        return
    is_done = 1
    if (tl.load(temperature_ptr + row) > 0.0) & is_finite:
        chosen, logit, total = _merge(parts_ptr, part_ids_ptr, row, CHUNKS)
        if HAS_TOP_P:
            tl.store(state_ptr + row * _STATE, logit)
            tl.store(state_ptr + row * _STATE + 1, largest)
            tl.store(state_ptr + row * _STATE + 2, total)
            is_done = tl.where(tl.load(top_p_ptr + row) >= 1.0, 1, 0)
    tl.store(tokens_ptr + row, chosen.to(tl.int64))
    if HAS_TOP_P:
        tl.store(done_ptr + row, is_done)


@triton.jit
def _next_kernel(
    top_p_ptr, state_ptr, tokens_ptr, done_ptr, mass_ptr, parts_ptr, part_ids_ptr, CHUNKS: tl.constexpr
):
    """Accept each open row's candidate, or go on with the best of what ranks before it."""
    row = tl.program_id(0)
    if tl.load(done_ptr + row) != 0:
        return
    if _is_inside(mass_ptr, top_p_ptr, state_ptr, row, CHUNKS):
        tl.store(done_ptr + row, 1)
    else:
        token, logit, _ = _merge(parts_ptr, part_ids_ptr, row, CHUNKS)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(state_ptr + row * _STATE, logit)


@triton.jit(do_not_specialize=["vocab", "stride"])
def _finish_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, seed_ptr, position_ptr, state_ptr, tokens_ptr, done_ptr, vocab,
    stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that are still open, a program each."""
    row = tl.program_id(0)
    is_open = tl.load(done_ptr + row) == 0
    if is_open:
        temperature = tl.load(temperature_ptr + row)
        largest = tl.load(state_ptr + row * _STATE + 1)
        allowed = tl.load(top_p_ptr + row) * tl.load(state_ptr + row * _STATE + 2)
        bound = tl.load(state_ptr + row * _STATE)
        candidate = tl.load(tokens_ptr + row).to(tl.int32)
        key, salt = _row_key(seed_ptr, position_ptr, row)
        logits_at = logits_ptr + row.to(tl.int64) * stride
        while is_open:
            _, token, logit, before = _scan(
                logits_at, 0, vocab, largest, temperature, key, salt, bound, candidate, 0.0, True, False,
                BLOCK,
            )  # fmt: skip
            is_open = before >= allowed
            if is_open:
                candidate = token
                bound = logit
        tl.store(tokens_ptr + row, candidate.to(tl.int64))


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    all_greedy: bool,
    any_top_p: bool,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    num_rounds: int = MAX_ROUNDS,
    num_chunks: int | None = None,
) -> torch.Tensor:
    """The rows' tokens [B] int64, NO_TOKEN where a row's largest logit is not finite. Rows are contiguous.

    Without `top_k` or `min_p` no row has it, and the kernels are those that do not know it.
    """
    num_rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    chunks = num_chunks or (64 if num_rows <= FEW_ROWS else 16)
    chunk_tokens = triton.cdiv(triton.cdiv(vocab, chunks), BLOCK) * BLOCK
    per_chunk = num_rows * chunks
    floats = torch.empty(5 * per_chunk + 4 * num_rows, dtype=torch.float32, device=device)
    words = torch.empty(2 * per_chunk + num_rows, dtype=torch.int32, device=device)
    largest, mass, parts, state = floats.split((per_chunk, per_chunk, 3 * per_chunk, 4 * num_rows))
    ids, part_ids, done = words.split((per_chunk, per_chunk, num_rows))
    stride = logits.stride(0)
    grid = (num_rows, chunks)
    _largest_kernel[grid](logits, largest, ids, vocab, chunk_tokens, stride, chunks, BLOCK=BLOCK, num_warps=4)

    bounds, ends = largest, ids  # placeholders that nobody reads
    if top_k is not None and not all_greedy:
        bounds, ends = top_k_bounds(logits, top_k, num_chunks=chunks)

    def draw(*, is_bounded: bool) -> None:
        _draw_kernel[grid](
            logits, largest, ids, temperature, top_p, seed, position, state, tokens, done, mass, parts,
            part_ids, bounds, ends, largest if min_p is None else min_p, vocab, chunk_tokens, stride,
            CHUNKS=chunks, BOUNDED=is_bounded, HAS_TOP_K=top_k is not None and not is_bounded,
            HAS_MIN_P=min_p is not None and not is_bounded, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip

    if not all_greedy:
        draw(is_bounded=False)
    _first_kernel[(num_rows,)](
        largest, ids, temperature, top_p, state, tokens, done, parts, part_ids,
        CHUNKS=chunks, ALL_GREEDY=all_greedy, HAS_TOP_P=any_top_p, num_warps=1,
    )  # fmt: skip
    if any_top_p and not all_greedy:
        for _ in range(num_rounds):
            _mass_kernel[grid](
                logits, temperature, state, tokens, done, mass, vocab, chunk_tokens, stride, chunks,
                BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
            draw(is_bounded=True)
            _next_kernel[(num_rows,)](
                top_p, state, tokens, done, mass, parts, part_ids, CHUNKS=chunks, num_warps=1
            )
        _finish_kernel[(num_rows,)](
            logits, temperature, top_p, seed, position, state, tokens, done, vocab, stride,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens
