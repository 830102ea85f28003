"""The modes that train nothing (``eval`` and ``rejection_sampling``) and their committed output."""
