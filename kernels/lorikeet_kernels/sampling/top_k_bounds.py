"""Where each row's top_k ends: its k-th largest logit, and the token that has it. No sort, no host sync.

Logits become 32-bit keys of the same order. Four times a row's tokens, those whose higher digits are known to
be the k-th key's, are counted by their next eight bits; the digit in whose bin the k-th lies is the next one.
Of tokens with equal logits the lower ids are kept, as a stable sort keeps them.

Shapes: logits [B, V] any float dtype; top_k [B] int64, 0 keeps all; result ([B] float32, [B] int32): a token
is kept where its logit is above the bound, or equal and its id below the end.
"""

# A Triton kernel's arguments have no Python types, and its launch takes options that its signature lacks.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

BLOCK = 1024
_MAX_ID = 0x7FFFFFFF
_BINS = tl.constexpr(256)
_END = tl.constexpr(_MAX_ID)


def top_k_bounds_reference(logits: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module."""
    vocab = logits.shape[1]
    values, ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    last = (top_k.clamp(1, vocab) - 1).unsqueeze(1)
    keeps_all = top_k == 0
    bounds = torch.where(keeps_all, float("-inf"), values.gather(1, last).squeeze(1))
    ends = torch.where(keeps_all, _MAX_ID, ids.gather(1, last).squeeze(1) + 1)
    return bounds, ends.to(torch.int32)


@triton.jit
def _keys(x):
    """Unsigned words in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit(do_not_specialize=["vocab", "chunk_tokens", "stride", "shift", "num_chunks"])
def _count_digits_kernel(
    logits_ptr, top_k_ptr, keys_ptr, counts_ptr, vocab, chunk_tokens, stride, shift, num_chunks,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[row, chunk, digit] of the tokens whose digits above shift + 8 are the row's."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(top_k_ptr + row) == 0:
        return
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, vocab)
    if not FIRST:
        known = tl.load(keys_ptr + row).to(tl.uint32)
    counts = tl.zeros([_BINS], tl.int32)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf"))
        key = _keys(x.to(tl.float32))
        asked = token < end
        if not FIRST:
            asked = asked & ((key >> (shift + 8)) == known)
        if tl.max(asked.to(tl.int32), axis=0) > 0:
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), _BINS, mask=asked)
    tl.store(counts_ptr + (row * num_chunks + chunk) * _BINS + tl.arange(0, _BINS), counts)


@triton.jit(do_not_specialize=["vocab"])
def _digit_kernel(
    top_k_ptr, keys_ptr, left_ptr, counts_ptr, vocab, FIRST: tl.constexpr, CHUNKS: tl.constexpr
):
    """The next digit of each row's key, and how many of the tokens that have it belong to the row's set."""
    row = tl.program_id(0)
    k = tl.load(top_k_ptr + row)
    if k == 0:
        return
    left = tl.minimum(k, vocab).to(tl.int32) if FIRST else tl.load(left_ptr + row)
    digit = tl.arange(0, _BINS)
    count = tl.zeros([_BINS], tl.int32)
    for chunk in range(CHUNKS):
        count += tl.load(counts_ptr + (row * CHUNKS + chunk) * _BINS + digit)
    above = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
    is_it = (above < left) & (above + count >= left)
    found = tl.sum(tl.where(is_it, digit, 0), axis=0).to(tl.int64)
    if not FIRST:
        found += tl.load(keys_ptr + row) * _BINS
    tl.store(left_ptr + row, left - tl.sum(tl.where(is_it, above, 0), axis=0))
    tl.store(keys_ptr + row, found)


@triton.jit(do_not_specialize=["vocab", "chunk_tokens", "stride"])
def _end_kernel(
    logits_ptr, top_k_ptr, keys_ptr, left_ptr, counts_ptr, bounds_ptr, ends_ptr, vocab, chunk_tokens, stride,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bound of each row's whole key, and the end: behind the last of the equal ones that are kept."""
    row = tl.program_id(0)
    if tl.load(top_k_ptr + row) == 0:
        tl.store(bounds_ptr + row, float("-inf"))
        tl.store(ends_ptr + row, _END)
        return
    left = tl.load(left_ptr + row)
    wanted = tl.load(keys_ptr + row)
    chunks = tl.arange(0, CHUNKS)
    equal = tl.load(counts_ptr + (row * CHUNKS + chunks) * _BINS + (wanted & 255))
    before = tl.cumsum(equal, axis=0) - equal
    is_it = (before < left) & (before + equal >= left)
    left -= tl.sum(tl.where(is_it, before, 0), axis=0)
    begin = tl.sum(tl.where(is_it, chunks, 0), axis=0) * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, vocab)
    key = wanted.to(tl.uint32)
    last = tl.min(chunks, axis=0)  # 0
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf"))
        has_it = ((_keys(x.to(tl.float32)) == key) & (token < end)).to(tl.int32)
        place = tl.cumsum(has_it, axis=0)
        last += tl.sum(tl.where((has_it > 0) & (place == left), token + 1, 0), axis=0)
        left -= tl.sum(has_it, axis=0)
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    tl.store(bounds_ptr + row, bits.to(tl.float32, bitcast=True))
    tl.store(ends_ptr + row, last)


def top_k_bounds(
    logits: torch.Tensor, top_k: torch.Tensor, *, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bounds, ends), by the kernels. A row's tokens lie side by side; rows with NaN get any bound."""
    num_rows, vocab = logits.shape
    device = logits.device
    bounds = torch.empty(num_rows, dtype=torch.float32, device=device)
    ends = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return bounds, ends
    keys = torch.empty(num_rows, dtype=torch.int64, device=device)
    words = torch.empty(num_rows * (1 + num_chunks * 256), dtype=torch.int32, device=device)
    # The counts first: where the others begin then is a multiple of 16 bytes, which kernels are compiled for.
    counts, left = words.split((num_rows * num_chunks * 256, num_rows))
    chunk_tokens = triton.cdiv(triton.cdiv(vocab, num_chunks), BLOCK) * BLOCK
    where = (vocab, chunk_tokens, logits.stride(0))
    for shift in (24, 16, 8, 0):
        _count_digits_kernel[(num_rows, num_chunks)](
            logits, top_k, keys, counts, *where, shift, num_chunks, FIRST=shift == 24, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
        _digit_kernel[(num_rows,)](
            top_k, keys, left, counts, vocab, FIRST=shift == 24, CHUNKS=num_chunks, num_warps=4
        )
    _end_kernel[(num_rows,)](
        logits, top_k, keys, left, counts, bounds, ends, *where, CHUNKS=num_chunks, BLOCK=BLOCK, num_warps=4
    )
    return bounds, ends
