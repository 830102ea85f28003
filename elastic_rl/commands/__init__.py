"""The commands of ``elastic-rl``, by what they are for. Nothing heavy is imported before a command needs it."""
