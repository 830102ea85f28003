"""How prompts become rewarded samples: the data source, the stages generate and reward, and evaluations."""
