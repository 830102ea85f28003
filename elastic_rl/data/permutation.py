"""A shuffle of [0, n) that is computed and not stored. Pure."""

from __future__ import annotations

import hashlib

MAX_SIZE = 1 << 62
_ROUNDS = 8


class Permutation:
    """A bijection of [0, size) that the key chooses, in constant memory: a Feistel network over the smallest square of
    a power of two that holds ``size``, walked along its cycles until it is back below ``size`` (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). The domain has less than 4 × ``size`` values, and at least 4."""

    def __init__(self, size: int, key: str) -> None:
        """Raises ValueError for a size outside 1 to 2**62."""
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation has 1 to {MAX_SIZE} values, not {size}")
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        """What the position is mapped to. Raises IndexError outside [0, size)."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} of a permutation of {self._size} values")
        value = self._encrypted(position)
        while value >= self._size:
            value = self._encrypted(value)
        return value

    def position(self, value: int) -> int:
        """The position that is mapped to the value. Raises IndexError outside [0, size)."""
        if not 0 <= value < self._size:
            raise IndexError(f"value {value} of a permutation of {self._size} values")
        position = self._decrypted(value)
        while position >= self._size:
            position = self._decrypted(position)
        return position

    def _encrypted(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in range(_ROUNDS):
            left, right = right, left ^ self._hash(number, right)
        return left << self._half_bits | right

    def _decrypted(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in reversed(range(_ROUNDS)):
            left, right = right ^ self._hash(number, left), left
        return left << self._half_bits | right

    def _hash(self, number: int, half: int) -> int:
        digest = hashlib.blake2b(b"%d/%d" % (number, half), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little") & self._mask
