"""When which faults happen: schedules from a seed, kept in a file, played again, and made smaller when they fail."""
