"""The modes that train nothing (``generate``, ``evaluate``, rejection sampling) and their committed output."""
