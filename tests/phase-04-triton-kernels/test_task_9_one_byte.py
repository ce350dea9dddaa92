"""Phase 4, task 9: an 8-bit cache: the store kernel that quantizes, and the attention that reads it."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import paged_decode_attention, store_kv
from minicache_course.checks import call, that

INT8, FP8 = torch.int8, torch.float8_e4m3fn
UNTOUCHED = 5.0

both = pytest.mark.parametrize("dtype", [pytest.param(INT8, id="int8"), pytest.param(FP8, id="e4m3")])


def random_rows(*shape):
    """Keys and values whose rows differ in size by a factor of up to a thousand."""
    return [torch.randn(shape) * 10 ** torch.empty(*shape[:2], 1).uniform_(-2, 1) for _ in range(2)]


def empty(device, num_blocks, block_size, num_kv_heads, head_dim, dtype):
    """Two caches and their scales, with a 5 everywhere."""
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), UNTOUCHED).to(dtype).to(device)
    scales = torch.full((2, num_blocks, block_size, num_kv_heads), UNTOUCHED, device=device)
    return [*caches, *scales]


@pytest.fixture(scope="session")
def stores(watched):
    """`stores(k, v, storage, slots)`: run store_kv on what `empty` gives."""

    def run(k, v, storage, slots):
        __tracebackhide__ = True
        device = storage[0].device
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        given = k.to(device), v.to(device), *storage[:2], slot_mapping
        call(watched(store_kv), *given, k_scale=storage[2], v_scale=storage[3]).gives(None)

    return run


@pytest.fixture(scope="session")
def quantizes(stores):
    """`quantizes(k, v, storage, slots)`: run store_kv, and compare `storage` with PyTorch's result.

    Rows must be finite, and none all zeros.
    """

    def run(k, v, storage, slots):
        __tracebackhide__ = True
        expected = [each.clone() for each in storage]
        stores(k, v, storage, slots)
        for which, rows in enumerate((k, v)):
            (cache, scales), name = expected[which::2], "kv"[which]
            for row, slot in zip(rows.float().cpu(), slots, strict=True):
                if slot >= 0:
                    where = slot // cache.shape[1], slot % cache.shape[1]
                    cache[where], scales[where] = (each.to(cache.device) for each in by_row(row, cache.dtype))
            got, got_scales = storage[which::2]
            that(f"{name}_scale afterwards", got_scales).gives(scales)
            that(f"the numbers in {name}_cache afterwards, as float32", got.float()).gives(cache.float())

    return run


def by_row(row, dtype):
    """Numbers `[H_kv, d]` and scales `[H_kv]` of one token's rows."""
    largest = 127.0 if dtype == INT8 else 448.0
    scale = row.abs().amax(-1) / largest
    numbers = (row / scale[:, None]).clamp(-largest, largest)
    return (numbers.round() if dtype == INT8 else numbers).to(dtype), scale


def read(storage, slot):
    """The dequantized keys and values of one slot: number · scale, `[2, H_kv, d]`."""
    k_cache, v_cache, k_scale, v_scale = storage
    where = slot // k_cache.shape[1], slot % k_cache.shape[1]
    pairs = ((k_cache, k_scale), (v_cache, v_scale))
    return torch.stack([cache[where].float() * scale[where][:, None] for cache, scale in pairs]).cpu()


# The store


def test_the_row_worked_by_hand(device, stores):
    """(0.5, −1.27, 0.013, 0.3) has the scale 1.27 / 127 = 0.01, and the numbers 50, −127, 1 and 30."""
    storage = empty(device, 1, 2, 1, 4, INT8)
    row = torch.tensor([[[0.5, -1.27, 0.013, 0.3]]])
    stores(row, 10 * row, storage, [1])
    that("the scale of the key", storage[2][0, 1].cpu()).is_close(torch.tensor([0.01]), atol=1e-8)
    that("the numbers of the key", storage[0][0, 1, 0].tolist()).gives([50, -127, 1, 30])
    that("the scale of the value, ten times the key", storage[3][0, 1].cpu()).is_close(torch.tensor([0.1]), atol=1e-7)


@both
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [
        pytest.param(*sizes, id=f"{sizes[0]} KV heads, d {sizes[1]}, blocks of {sizes[2]}")
        for sizes in ((3, 5, 4), (2, 64, 16), (17, 4, 4))
    ],
)
def test_each_row_has_its_own_scale(device, quantizes, num_kv_heads, head_dim, block_size, dtype):
    """Each token and head: scale = largest / 127 (448), numbers = row / scale, rounded. Nothing else changes."""
    storage = empty(device, 4, block_size, num_kv_heads, head_dim, dtype)
    slots = [block_size + 1, 0, 4 * block_size - 1, block_size, 2 * block_size + 3]
    quantizes(*random_rows(5, num_kv_heads, head_dim), storage, slots)


@pytest.mark.parametrize("scale", [pytest.param(s, id=f"scale {s}") for s in (1, 7)])
def test_halves_go_to_the_even_integer(device, quantizes, scale):
    """0.5, 1.5, 2.5, … scales become 0, 2, 2, …, and −2.51 becomes −3. 45.5 / 7 is 6.5, 45.5 · (1 / 7) more."""
    halves = torch.arange(-126.5, 127, 1.0)
    row = scale * torch.cat([halves, torch.tensor([127.0, 0.49, -2.51])]).expand(1, 1, -1)
    quantizes(row, -row, empty(device, 1, 4, 1, row.shape[2], INT8), [2])


def test_every_number_of_e4m3_is_stored_as_it_is(device, quantizes):
    """A row with 448 has scale 1, and the 127 e4m3 values from 0 to 448 are stored exactly, with either sign."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    row = torch.stack([codes, -codes])[None]
    quantizes(row, row.flip(2), empty(device, 1, 4, 2, 127, FP8), [1])


def test_halves_between_numbers_of_e4m3(device, quantizes):
    """Half-way between two e4m3 values: to the one whose last bit is 0. Slightly off: to the nearer one."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    halves = (codes[1:] + codes[:-1]) / 2
    rows = torch.stack([halves, halves * 1.001, -halves * 0.999, -halves])
    row = torch.cat([rows, torch.full((4, 1), 448.0)], dim=1)[None]
    quantizes(row, row.flip(1), empty(device, 1, 4, 4, 127, FP8), [3])


@both
def test_a_row_of_zeros(device, stores, dtype):
    """Zeros are stored and read as zeros: 0 is not divided by 0. The other heads are unaffected."""
    k, v = random_rows(2, 2, 16)
    k[0, 1] = v[1] = 0
    storage = empty(device, 2, 4, 2, 16, dtype)
    stores(k, v, storage, [6, 1])
    that("the numbers of the key of zeros", storage[0][1, 2, 1].float().cpu()).gives(torch.zeros(16))
    that("what the key of zeros is read as", read(storage, 6)[0, 1]).gives(torch.zeros(16))
    that("what the value of zeros is read as", read(storage, 1)[1]).gives(torch.zeros(2, 16))
    near = k[0, 0].abs().max().item() / 20
    that("what the key of the other head is read as", read(storage, 6)[0, 0]).is_close(k[0, 0], rtol=0, atol=near)


@both
def test_tiny_and_huge_rows(device, quantizes, dtype):
    """Rows of 10⁻³⁰ and of 10³⁰: the scale absorbs any magnitude."""
    k, v = random_rows(2, 2, 16)
    quantizes(k * 1e-30, v * 1e30, empty(device, 2, 4, 2, 16, dtype), [6, 1])


@both
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")], ids=str)
def test_a_row_that_is_not_finite(device, stores, dtype, bad):
    """A row with NaN or ±∞ reads as NaN, never as plausible numbers; other rows are unaffected."""
    k, v = random_rows(2, 2, 16)
    k[0, 1, 3] = v[1, 0, 15] = bad
    storage = empty(device, 2, 4, 2, 16, dtype)
    stores(k, v, storage, [6, 1])
    that("how many numbers of the key are read as NaN", read(storage, 6)[0, 1].isnan().sum().item()).gives(16)
    that("how many numbers of the value are read as NaN", read(storage, 1)[1, 0].isnan().sum().item()).gives(16)
    for what, got, row in (("key", read(storage, 6)[0, 0], k[0, 0]), ("value", read(storage, 1)[1, 1], v[1, 1])):
        near = row.abs().max().item() / 20
        that(f"what the {what} of another head is read as", got).is_close(row, rtol=0, atol=near)


@pytest.mark.parametrize("slots", [[-1, 3, 9], [3, -1, 9], [-1, -1, -1]], ids=str)
def test_padding(device, quantizes, slots):
    """Slot −1 is padding: neither numbers nor a scale are written, and the row may hold NaN."""
    k, v = random_rows(3, 3, 20)
    for token, slot in enumerate(slots):
        if slot < 0:
            k[token] = v[token] = float("nan")
    quantizes(k, v, empty(device, 3, 4, 3, 20, INT8), slots)


def test_any_negative_slot_is_skipped(device, store_rows):
    """Every negative slot is padding, not only −1."""
    storage = empty(device, 3, 4, 2, 16, INT8)
    k, v = (each.to(device) for each in random_rows(2, 2, 16))
    slots = torch.tensor([-7, -2], device=device)
    call(store_rows, k, v, *storage[:2], slots, k_scale=storage[2], v_scale=storage[3]).gives(None)
    for name, each in zip(("k_cache", "v_cache", "k_scale", "v_scale"), storage, strict=True):
        that(f"{name} after slots −7 and −2", each).gives(torch.full_like(each, UNTOUCHED))


@both
def test_a_block_may_be_filled_in_any_pieces(device, stores, quantizes, dtype):
    """Rows stored one by one equal those stored at once, bit for bit: a later, larger row changes no earlier one."""
    k, v = random_rows(4, 2, 16)
    size = 4.0 ** torch.arange(4)[:, None, None]
    at_once, in_pieces = empty(device, 2, 4, 2, 16, dtype), empty(device, 2, 4, 2, 16, dtype)
    quantizes(k * size, v * size, at_once, list(range(4)))
    for start, end in ((0, 1), (1, 3), (3, 4)):
        stores((k * size)[start:end], (v * size)[start:end], in_pieces, list(range(start, end)))
    for name, one, other in zip(("k_cache", "v_cache", "k_scale", "v_scale"), in_pieces, at_once, strict=True):
        that(f"{name}, filled in three pieces", one.float()).gives(other.float())


@both
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_rows_in_half_precision(device, quantizes, dtype, stored):
    """Keys and values may be fp16 or bf16; all arithmetic is in fp32."""
    k, v = random_rows(3, 2, 16)
    quantizes(k.to(stored), v.to(stored), empty(device, 3, 4, 2, 16, dtype), [5, 11, 0])


def test_strides(device, quantizes):
    """Rows as slices of one matrix product; caches as views of larger tensors, with unrelated strides."""
    qkv = torch.randn(4, (4 + 2 + 2) * 16, device=device)
    k, v = qkv[:, 64:96].view(4, 2, 16), qkv[:, 96:].view(4, 2, 16)
    quantizes(k, v, empty(device, 3, 4, 2, 16, INT8), [8, 9, 10, 11])
    k_cache, v_cache, *scales = empty(device, 3, 4, 2, 32, INT8)
    strided = [k_cache[..., ::2], v_cache[..., :16].permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1), *scales]
    quantizes(k.permute(0, 1, 2), torch.randn(16, 2, 4).permute(2, 1, 0), strided, [1, 9, 6, 11])


def test_no_tokens(device, quantizes):
    """Nothing to store: no error, and nothing changes."""
    quantizes(*random_rows(0, 2, 16), empty(device, 3, 4, 2, 16, INT8), [])


# The attention


@both
@pytest.mark.parametrize("length", [16, 3], ids=lambda what: f"{what} tokens")
def test_decode(quantized, decode, dtype, length):
    """A score is multiplied by its key's scale, a probability by its value's. Unused scales hold NaN."""
    decode(quantized([length], 1, 16, 8, dtype=dtype), 1)


def test_more_than_one_tile(quantized, decode):
    """Each tile loads the scales of its tokens."""
    decode(quantized([40], 1, 256, 8), 2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 3)])
def test_groups_of_query_heads(quantized, decode, num_heads, num_kv_heads):
    """KV head h reads the scales of head h, for any group size."""
    decode(quantized([21], num_kv_heads, 16, 8), num_heads)


@pytest.mark.parametrize("block_size", [5, 16], ids=lambda what: f"blocks of {what}")
def test_block_sizes(quantized, decode, block_size):
    """One token, one less than a block holds, all of it, one more, and none. Blocks may be anywhere."""
    decode(quantized([1, block_size - 1, block_size, block_size + 1, 0], 1, 80, block_size), 2)


def test_scores_far_from_zero(quantized, decode, device):
    """Products of numbers are in the tens of thousands: the maximum is taken after scaling."""
    some = quantized([33], 1, 64, 16)
    decode(some, 4, q=3 * torch.sign(torch.randn(1, 4, 64)).to(device))


def test_shared_blocks(quantized, decode):
    """Two sequences that share their first block share its scales."""
    some = quantized([20, 17], 1, 16, 8)
    some.block_tables[1:, 0] = some.block_tables[0, 0]
    for rows in (some.keys, some.values):
        for each in rows[1:]:
            each[:8] = rows[0][:8]
    decode(some, 2)


@pytest.mark.parametrize("window", [1, 16], ids=lambda what: f"a window of {what}")
def test_sliding_window(quantized, decode, window):
    """No scale before the window is loaded."""
    decode(quantized([21], 1, 16, 8), 2, sliding_window=window)


def test_the_soft_cap_comes_after_the_scale(quantized, decode, device):
    """The cap applies to the scaled score; ALiBi is added after it, unscaled."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    decode(quantized([21], 1, 16, 8), 4, softcap=1.5, scale=0.7, alibi_slopes=slopes)


def test_splits(quantized, decode):
    """Split-KV passes the scales on to attend_range."""
    decode(quantized([40], 2, 256, 8), 4, num_splits=2)


def test_prefill(quantized, prefill):
    """Prefill passes the scales on too: a chunk, a single token, a whole prompt."""
    prefill(quantized([21, 9, 5], 2, 16, 8), [4, 1, 5], 4)


@both
def test_what_is_stored_is_what_is_read(device, stores, watched, dtype):
    """Stored and read through the same table, decode is close to attention over the unquantized rows."""
    k, v = torch.randn(2, 5, 2, 64)
    storage = empty(device, 4, 2, 2, 64, dtype)
    table = [2, 0, 3]
    stores(k, v, storage, [2 * table[token // 2] + token % 2 for token in range(5)])
    q = torch.randn(1, 4, 64)
    tables, lengths = torch.tensor([table], device=device), torch.tensor([5], device=device)
    scales = {"k_scale": storage[2], "v_scale": storage[3]}
    attention = watched(paged_decode_attention)
    got = call(attention, q.to(device), *storage[:2], tables, lengths, num_splits=1, **scales).value
    scores = torch.einsum("gd,sd->gs", q[0, :2], k[:, 0]) / 8, torch.einsum("gd,sd->gs", q[0, 2:], k[:, 1]) / 8
    exact = torch.cat([score.softmax(-1) @ v[:, head] for head, score in enumerate(scores)])
    that("the output over the quantized cache", got[0].cpu()).is_close(
        exact, rtol=0, atol=0.02 if dtype == INT8 else 0.1
    )


def test_a_row_that_is_not_finite_reaches_its_own_sequence_only(quantized, watched, device):
    """A key whose scale is NaN makes the outputs of its head NaN, and no other head's or sequence's."""
    some = quantized([21, 7], 2, 16, 8)
    some.token_scales["k_scale"][some.block_tables[0, 1], 3, 1] = float("nan")
    q = torch.randn(2, 4, 16, device=device)
    got = call(watched(paged_decode_attention), q, *some.paged, num_splits=1, **some.token_scales).value
    expected = [[False, False, True, True], [False] * 4]
    that("which heads are all NaN, by sequence", got.isnan().all(-1).tolist()).gives(expected)
    that("which heads hold a NaN, by sequence", got.isnan().any(-1).tolist()).gives(expected)


@pytest.mark.parametrize(
    "dim", [pytest.param(d, id=n) for d, n in enumerate(("blocks", "slots in the block", "heads"))]
)
def test_a_cache_of_more_than_two_billion_numbers(device, stores, far_apart, dim):
    """A block, a slot in it or a head times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    storage = empty(device, 3, 3, 3, 16, INT8)
    near = [each.clone() for each in storage]
    storage[:2] = [far_apart(each, dim) for each in storage[:2]]
    k, v = random_rows(2, 3, 16)
    stores(k, v, storage, [8, 1])
    stores(k, v, near, [8, 1])
    for name, one, other in zip(("k_cache", "v_cache", "k_scale", "v_scale"), storage, near, strict=True):
        that(f"{name}, against what the same call makes of a small cache", one.contiguous()).gives(other)


def test_rows_more_than_two_billion_numbers_apart(device, quantizes, far_apart):
    """k and v may be views of a tensor so large that a token times its stride exceeds 2³¹ − 1."""
    k, v = (far_apart(each.half(), 0) for each in random_rows(3, 2, 16))
    quantizes(k, v, empty(device, 3, 4, 2, 16, INT8), [6, 1, 4])


def test_slots_with_gaps(device, watched):
    """slot_mapping may be every second number of a wider tensor: the launcher makes it contiguous."""
    k, v = (each.to(device) for each in random_rows(3, 2, 16))
    one, other = (empty(device, 3, 4, 2, 16, INT8) for _ in range(2))
    slots = torch.tensor([6, 4, -1, 4, 1, 4], device=device)[::2]
    for storage, mapping in ((one, slots), (other, slots.contiguous())):
        scales = {"k_scale": storage[2], "v_scale": storage[3]}
        call(watched(store_kv), k, v, *storage[:2], mapping, **scales).gives(None)
    for name, mine, right in zip(("k_cache", "v_cache", "k_scale", "v_scale"), one, other, strict=True):
        that(f"{name}, against contiguous slots", mine).gives(right)
