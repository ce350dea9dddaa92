"""Phase 0, task 1: the numbers worked by hand. A wrong one gets a diagnosis, never the answer."""

from minicache import paper
from minicache.course.checks import call

EXACT = 0.0
KEYS_ONLY = "a token leaves a key and a value"
ONE_LAYER = "that is one layer; add up all of them"
FLOAT32 = "a 16-bit number takes 2 bytes, not 4"
BITS = "that is bits; 8 of them are a byte"
ONE_BYTE = "each number takes 2 bytes"


def test_opt_13b_bytes_per_token() -> None:
    hints = {
        1 / 2: f"{KEYS_ONLY}, and {ONE_BYTE}: one of the two is missing",
        1 / 4: f"{KEYS_ONLY}, and {ONE_BYTE}: both are missing",
        1 / 40: "40 layers with 40 heads each: one of the two is missing",
        1 / 128: "each head has 128 numbers, not one",
        40: "the 5,120 of the hidden size are the 40 heads already",
        2: FLOAT32,
        8: BITS,
        1000 / 1024: "800 KB is rounded, and 1 KB stands for 1,024 bytes there; give bytes",
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.opt_13b_bytes_per_token).is_near(819_200, EXACT, reveal=False, factors=hints)


def test_opt_13b_slots_in_12_gib() -> None:
    hints = {
        12e9 / (12 * 2**30): "12 GiB are 12 · 1,024³ bytes, not 12 · 10⁹",
        2: "your bytes per token are half of what they should be",
        40 / 12: "the weights take their part of the 40 GB; 12 GiB are left",
        10 / 3: "the weights take their part of the 40 GB; 12 GiB are left",
    }
    call(paper.opt_13b_slots_in_12_gib).is_near(15_728, 0.002, reveal=False, factors=hints)


def test_llama_3_8b_bytes_per_token() -> None:
    hints = {
        4: "query heads leave nothing in the cache: count the 8 KV heads",
        1 / 2: f"{KEYS_ONLY}, and {ONE_BYTE}: one of the two is missing",
        2: FLOAT32,
        8: f"query heads leave nothing in the cache, and {FLOAT32}; or that is bits",
        1 / 8: "every KV head has a key and a value of its own",
        1 / 32: ONE_LAYER,
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.llama_3_8b_bytes_per_token).is_near(131_072, EXACT, reveal=False, factors=hints)


def test_llama_3_8b_sequences_in_60_gib() -> None:
    hints = {
        2048: "that is tokens; a sequence takes 2,048 of them",
        1 / 4: "the cache holds 8 KV heads a layer, not 32",
        2: "your bytes per token are half of what they should be",
        1 / 2: "your bytes per token are twice what they should be",
        223 / 240: "60 GiB are 60 · 1,024³ bytes, not 60 · 10⁹",
    }
    call(paper.llama_3_8b_sequences_in_60_gib).is_near(240, EXACT, reveal=False, factors=hints)


def test_deepseek_v3_bytes_per_token() -> None:
    hints = {
        2: "keys and values are both made from one latent: count it once. Or: 2 bytes a number, not 4",
        128: "all 128 heads share the latent",
        256: "all 128 heads share the latent, and keys and values are both made from it",
        512 / 576: "the RoPE key stands beside the latent and takes room too",
        1 / 2: ONE_BYTE,
        1 / 61: ONE_LAYER,
        8: BITS,
    }
    call(paper.deepseek_v3_bytes_per_token).is_near(70_272, EXACT, reveal=False, factors=hints)


def test_unused_rows_bytes() -> None:
    hints = {
        1 / 4: "every layer has its own 60 empty rows",
        64 / 60: "that is the whole cache; 4 rows are in use",
        4 / 60: "those rows are in use; the others are not",
        2: "the 64 bytes of a row are key and value together",
        1 / 64: "that is rows; each takes 64 bytes",
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.unused_rows_bytes).is_near(15_360, EXACT, reveal=False, factors=hints)


def test_a100_ridge_point() -> None:
    hints = {
        (1.555 / 312) ** 2: "FLOP/s over bytes/s, not the other way round",
        1e3: "both rates are in 10¹²: one has lost three zeros",
        1e-3: "both rates are in 10¹²: one has lost three zeros",
        2: "312 · 10¹² is the dense peak; sparsity does not count",
    }
    call(paper.a100_ridge_point).is_near(312e12 / 1.555e12, 0.01, reveal=False, factors=hints)


def test_decode_intensity_at_batch_1() -> None:
    hints = {
        2: "a weight takes 2 bytes, not 1",
        1 / 2: "a multiplication and an addition are 2 FLOPs",
        1 / 8: "that is FLOPs per bit",
    }
    call(paper.decode_intensity_at_batch_1).is_near(1.0, 0.01, reveal=False, factors=hints)


def test_decode_break_even_batch_on_a100() -> None:
    hints = {
        200 / 201: "one fewer is still just left of the ridge: round up",
        101 / 201: "the intensity at batch 1 is not 2",
        100 / 201: "the intensity at batch 1 is not 2",
        401 / 201: "the intensity at batch 1 is not 1/2",
        402 / 201: "the intensity at batch 1 is not 1/2",
        1 / 201: "one sequence is nowhere near the ridge",
    }
    call(paper.decode_break_even_batch_on_a100).is_near(201, EXACT, reveal=False, factors=hints)
