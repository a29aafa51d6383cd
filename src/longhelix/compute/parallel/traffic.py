"""Counts the collectives of a group, with a fingerprint to compare between ranks."""

from typing import NamedTuple

_MODULUS = 2**64
_FACTOR = 0x100000001B3  # that of csrc/collectives.hpp


class Traffic(NamedTuple):
    """A sequence of collectives: how many, a fingerprint of them in their order, and what this rank sent in exchanges.

    The fingerprint is a polynomial in a fixed factor, modulo 2^64, with one number for each collective: its kind, and
    its size if all ranks of the stage agree on it. So fingerprints of consecutive sequences can be combined and
    subtracted.
    exchanged_bytes: see `RankGroup.exchanged_bytes`.
    """

    collectives: int = 0
    fingerprint: int = 0
    exchanged_bytes: int = 0

    def then(self, later: "Traffic") -> "Traffic":
        """Return this sequence followed by `later`."""
        return Traffic(
            self.collectives + later.collectives,
            (self._shifted(later.collectives) + later.fingerprint) % _MODULUS,
            self.exchanged_bytes + later.exchanged_bytes,
        )

    def since(self, before: "Traffic") -> "Traffic":
        """Return the collectives after `before`, which is the beginning of this sequence."""
        count = self.collectives - before.collectives
        return Traffic(
            count,
            (self.fingerprint - before._shifted(count)) % _MODULUS,
            self.exchanged_bytes - before.exchanged_bytes,
        )

    def _shifted(self, count: int) -> int:
        return self.fingerprint and self.fingerprint * pow(_FACTOR, count, _MODULUS)
