"""Several hosts: how they meet, how the engine reaches ranks on them, and what followers do."""
