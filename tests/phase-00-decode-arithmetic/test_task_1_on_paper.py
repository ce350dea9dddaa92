"""Phase 0, task 1: the numbers worked by hand. A wrong one gets a diagnosis, never the answer."""

from minicache.arithmetic import paper
from minicache_course.checks import call

EXACT = 0.0
KEYS_ONLY = "a token leaves a key and a value"
ONE_LAYER = "that is one layer; add up all of them"
FLOAT32 = "a 16-bit number takes 2 bytes, not 4"
BITS = "that is bits; 8 of them are a byte"
ONE_BYTE = "each number takes 2 bytes"


def test_opt_13b_bytes_per_token() -> None:
    """OPT-13B: the bytes that one token leaves in the cache."""
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


def test_qwen3_14b_bytes_per_token() -> None:
    """Qwen3-14B: the bytes that one token leaves in the cache."""
    hints = {
        5: "query heads leave nothing in the cache: count the 8 KV heads",
        1 / 2: f"{KEYS_ONLY}, and {ONE_BYTE}: one of the two is missing",
        2: FLOAT32,
        10: f"query heads leave nothing in the cache, and {FLOAT32}",
        8: BITS,
        1 / 8: "every KV head stores its own key and value",
        1 / 40: ONE_LAYER,
        1 / 128: "each head has 128 numbers, not one",
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.qwen3_14b_bytes_per_token).is_near(163_840, EXACT, reveal=False, factors=hints)


def test_deepseek_v2_bytes_per_token() -> None:
    """DeepSeek-V2, with its latent: the bytes that one token leaves in the cache."""
    hints = {
        2: "keys and values are both made from one latent: count it once. Or: 2 bytes per number, not 4",
        128: "all 128 heads share the latent",
        256: "all 128 heads share the latent, and keys and values are both made from it",
        512 / 576: "the RoPE key is stored in addition to the latent",
        61 / 60: "61 layers are DeepSeek-V3",
        1 / 2: ONE_BYTE,
        1 / 60: ONE_LAYER,
        8: BITS,
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.deepseek_v2_bytes_per_token).is_near(69_120, EXACT, reveal=False, factors=hints)


def test_opt_30b_slots_in_20_gib() -> None:
    """OPT-30B: the tokens whose keys and values fit into 20 GiB."""
    hints = {
        20e9 / (20 * 2**30): "20 GiB are 20 · 1,024³ bytes, not 20 · 10⁹",
        2: "your bytes per token are half of what they should be",
        1 / 2: "your bytes per token are twice what they should be",
        4: "weights and reserve take 60 of the 80 GiB; 20 GiB are left",
        48: "a token leaves a key and a value in each of the 48 layers",
        56: "every layer has 56 heads",
        1_376_256 / 819_200: "that is a token of OPT-13B; OPT-30B has more layers and more heads",
    }
    call(paper.opt_30b_slots_in_20_gib).is_near(15_603, 0.002, reveal=False, factors=hints)


def test_qwen3_14b_sequences_in_48_gib() -> None:
    """Qwen3-14B: the whole sequences of 8,192 tokens that fit into 48 GiB."""
    hints = {
        314_572 / 38: "that is tokens; a sequence takes 8,192 of them",
        7 / 38: "the cache holds 8 KV heads a layer, not 40",
        2: "your bytes per token are half of what they should be",
        1 / 2: "your bytes per token are twice what they should be",
        35 / 38: "48 GiB are 48 · 1,024³ bytes, not 48 · 10⁹",
        38.4 / 38: "a part of a sequence does not fit: round down",
        39 / 38: "the last one does not fit: round down",
    }
    call(paper.qwen3_14b_sequences_in_48_gib).is_near(38, EXACT, reveal=False, factors=hints)


def test_unused_rows_bytes() -> None:
    """64 slots reserved, 4 in use: the bytes of the other 60, in all layers."""
    hints = {
        1 / 4: "every layer has its own 60 empty slots",
        64 / 60: "that is the whole cache; 4 slots are in use",
        4 / 60: "those slots are in use; the others are not",
        2: "the 64 bytes of a slot are key and value together",
        1 / 64: "that is slots; each takes 64 bytes",
        1 / 1024: "give bytes, not KiB",
    }
    call(paper.unused_rows_bytes).is_near(15_360, EXACT, reveal=False, factors=hints)


def test_h100_pcie_ridge_point() -> None:
    """H100 PCIe: the FLOP/byte at which a dense model is no longer memory-bound."""
    ridge = 756.5e12 / 2.0e12
    hints = {
        2: "the peak with sparsity is twice that of a dense model",
        1 / ridge**2: "FLOP/s over bytes/s, not the other way round",
        2 / 1513 / ridge: "FLOP/s over bytes/s, not the other way round; and the dense peak is half of 1,513 · 10¹²",
        1e3: "both rates are in 10¹²: one has lost three zeros",
        1e-3: "both rates are in 10¹²: one has lost three zeros",
    }
    call(paper.h100_pcie_ridge_point).is_near(ridge, 0.01, reveal=False, factors=hints)


def test_decode_intensity_with_int8_weights() -> None:
    """Decode at batch 1, weights in int8: FLOPs per byte."""
    hints = {
        1 / 2: "a multiplication and an addition are 2 FLOPs, and an int8 is 1 byte: one of the two is wrong",
        1 / 4: "that is bytes per FLOP",
        1 / 8: "that is FLOPs per bit",
    }
    call(paper.decode_intensity_with_int8_weights).is_near(2.0, 0.01, reveal=False, factors=hints)


def test_decode_break_even_batch_on_h100_pcie() -> None:
    """H100 PCIe, weights in int8, FLOPs in 16 bits, no cache: the first batch that is not memory-bound."""
    not_one = "the intensity at batch 1 is not 1; or the ridge is that of the peak with sparsity"
    hints = {
        189 / 190: "189 is still left of the ridge: round up",
        189.125 / 190: "a part of a sequence cannot be served: round up",
        378 / 190: not_one,
        379 / 190: not_one,
        757 / 190: "the intensity at batch 1 is not 1/2",
        1 / 190: "one sequence is nowhere near the ridge",
    }
    call(paper.decode_break_even_batch_on_h100_pcie).is_near(190, EXACT, reveal=False, factors=hints)
