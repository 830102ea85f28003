"""Prompt groups between those who generate and those who train them: the flow, which decides; the queue, which holds
their data; and who generates, the loop itself or a thread beside it."""
