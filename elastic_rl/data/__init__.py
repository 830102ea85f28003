"""Where prompts come from, in which order, and the record of which were trained on."""
