"""Where keys live: KV blocks, and the placements that choose their owners. Ids and counts, no bytes."""
