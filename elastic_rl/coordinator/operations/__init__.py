"""Operations: what takes longer than a request (scale, drain, restart), from its request to its result."""
