"""Client of the admin API, for the CLI and for other tools."""
