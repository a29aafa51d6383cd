"""Splits of a sequence's tokens: the pieces that GPUs attend to, the memory for their states, and the lengths that
launches are made for."""

# Splits begin at fixed positions, so that a row's bits do not depend on its batch.
SPLIT_TOKENS = 4096
FEW_ROWS = 16  # of a sequence, up to which its keys are read for few rows at a time
STATES_BYTES = 256 * 2**20  # what the states of splits may take at a time, or those of one row if they take more


def length_bucket(tokens: int) -> int:
    """Return the length bucket of sequences of up to `tokens`: one split, four, sixteen, ..."""
    bucket = SPLIT_TOKENS
    while bucket < tokens:
        bucket *= 4
    return bucket


def length_buckets(longest_tokens: int) -> list[int]:
    """Return all buckets, up to that of the longest sequence."""
    buckets = [SPLIT_TOKENS]
    while buckets[-1] < longest_tokens:
        buckets.append(4 * buckets[-1])
    return buckets


def state_bytes(num_splits: int, num_query_heads: int, value_size: int) -> int:
    """Return bytes of the states of one row: a value and an LSE for each split and head, in float32."""
    return num_splits * num_query_heads * (value_size + 1) * 4


def rows_at_once(num_splits: int, num_query_heads: int, value_size: int, tile_rows: int) -> int:
    """Return for how many rows states are kept at a time: whole tiles of `tile_rows`, if there is room for one."""
    rows = max(1, STATES_BYTES // max(state_bytes(num_splits, num_query_heads, value_size), 1))
    return rows - rows % tile_rows if rows > tile_rows > 0 else rows


def most_state_bytes(longest_tokens: int, num_query_heads: int, value_size: int) -> int:
    """Return the most bytes that states take in steps with sequences of up to `longest_tokens`."""
    num_splits = length_bucket(longest_tokens) // SPLIT_TOKENS
    if num_splits == 1:
        return 0
    return max(STATES_BYTES, state_bytes(num_splits, num_query_heads, value_size))
