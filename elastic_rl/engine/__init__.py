"""SGLang backend: the server's process, the weight loader, the engine's lifecycle, and the router of a pool."""
