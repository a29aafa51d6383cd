"""Where keys live: KV blocks, their owners, and the policies that choose them. Ids and counts, no bytes."""
