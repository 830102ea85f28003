"""The models that SGLang imports at the start of an engine on a CPU; see ``launch``."""
